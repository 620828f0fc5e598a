"""Small networks, each around one layer, that the tests of layers share."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from subfleet.export.steps import SampleSpec

__all__ = ["BRANCHES", "GROUPS", "TOKENS", "group_of"]

IMAGE, LINE, SEQUENCE, ROW = (4, 5, 6), (4, 8), (5, 8), (8,)


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        outputs: Tensor = self.attention(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=False)[0]
        return outputs


class SqueezeAndExcitation(nn.Module):
    """Channels scaled by weights that depend on the averages of all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = functional.adaptive_avg_pool2d(x, 1)
        return x * functional.hardsigmoid(self.up(functional.relu(self.down(squeezed))))


class Weighed(nn.Module):
    """A layer with weights before it, so that its backward pass matters, and a linear head after it.

    It reads only as many of the input's numbers as it needs.
    """

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.layer = layer
        with torch.no_grad():
            outputs = layer(torch.zeros(2, *shape))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        self.head = nn.Linear(outputs[0].numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        own = x.flatten(1)[:, : math.prod(self.shape)].reshape(-1, *self.shape)
        outputs = self.layer(own * self.scale + self.shift)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        logits: Tensor = self.head(outputs.flatten(1))
        return logits


class SideBySide(nn.Module):
    """Independent layers, so that one program tests them all and an error names its branch."""

    def __init__(self, branches: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name.replace(".", ""): branch for name, branch in branches.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches.values()]).sum(0)


class Embedded(nn.Module):
    """An embedding of tokens, which may include padding, and a linear head."""

    def __init__(self, padding_index: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_index)
        self.head = nn.Linear(20, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).flatten(1))
        return logits


def _around(shape: tuple[int, ...], layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Weighed(layer(), shape)


def _function(shape: tuple[int, ...], function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return _around(shape, partial(Applied, function))


_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU,
    nn.Softplus, nn.PReLU, nn.LogSigmoid, nn.Softshrink,
)  # fmt: skip
BRANCHES: Mapping[str, Mapping[str, Callable[[], nn.Module]]] = MappingProxyType(
    {
        "activations": {
            **{layer.__name__: _around(ROW, layer) for layer in _ACTIVATIONS},
            "GELU tanh": _around(ROW, partial(nn.GELU, approximate="tanh")),
            "Softmax": _around(IMAGE, partial(nn.Softmax, dim=1)),
            "LogSoftmax": _around(ROW, partial(nn.LogSoftmax, dim=1)),
        },
        "normalisations": {
            "GroupNorm": _around(IMAGE, partial(nn.GroupNorm, 2, 4)),
            "InstanceNorm": _around(IMAGE, partial(nn.InstanceNorm2d, 4, affine=True)),
            "BatchNorm frozen": _around(IMAGE, lambda: nn.BatchNorm2d(4).eval()),
            "LayerNorm": _around(SEQUENCE, partial(nn.LayerNorm, 8)),
            "LayerNorm of two dimensions, plain": _around(
                SEQUENCE, partial(nn.LayerNorm, (5, 8), elementwise_affine=False)
            ),
            "LayerNorm without bias": _around(SEQUENCE, partial(nn.LayerNorm, 8, bias=False)),
            "RMSNorm": _around(SEQUENCE, partial(nn.RMSNorm, 8)),
            "RMSNorm plain": _around(SEQUENCE, partial(nn.RMSNorm, 8, elementwise_affine=False)),
        },
        "pooling": {
            "MaxPool2d": _around(IMAGE, partial(nn.MaxPool2d, 2)),
            "MaxPool2d overlapping": _around(IMAGE, partial(nn.MaxPool2d, 3, 2, 1)),
            "MaxPool2d ceil_mode": _around(IMAGE, partial(nn.MaxPool2d, 2, 2, ceil_mode=True)),
            "MaxPool1d": _around(LINE, partial(nn.MaxPool1d, 3, 2)),
            "AvgPool2d": _around(IMAGE, partial(nn.AvgPool2d, (1, 2))),
            "AvgPool2d overlapping": _around(IMAGE, partial(nn.AvgPool2d, 3, 2, 1, ceil_mode=True)),
            "AvgPool2d without padding": _around(IMAGE, partial(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
            "AvgPool1d": _around(LINE, partial(nn.AvgPool1d, 2)),
            "AdaptiveAvgPool2d": _around(IMAGE, partial(nn.AdaptiveAvgPool2d, (3, 4))),
            "AdaptiveAvgPool2d to one": _around(IMAGE, partial(nn.AdaptiveAvgPool2d, 1)),
            "AdaptiveAvgPool1d": _around(LINE, partial(nn.AdaptiveAvgPool1d, 3)),
            "AdaptiveMaxPool2d": _around(IMAGE, partial(nn.AdaptiveMaxPool2d, (3, 4))),
            "AdaptiveMaxPool1d": _around(LINE, partial(nn.AdaptiveMaxPool1d, 3)),
            "squeeze and excitation": _around(IMAGE, SqueezeAndExcitation),
        },
        "shapes": {
            "residual": _function(IMAGE, lambda x: x + torch.tanh(x)),
            "concatenating": _function(IMAGE, lambda x: torch.cat([x, torch.tanh(x)], 1)),
            "pad": _function(IMAGE, lambda x: functional.pad(x, (1, 0, -1, 2))),
            "ReflectionPad2d": _around(IMAGE, partial(nn.ReflectionPad2d, 1)),
            "ReplicationPad1d": _around(LINE, partial(nn.ReplicationPad1d, (1, 2))),
            "CircularPad1d": _around(LINE, partial(nn.CircularPad1d, 1)),
            "slices": _function(IMAGE, lambda x: x[:, 1:3, ::2] + x[:, -1:, 1:4]),
            "chunks": _function(IMAGE, lambda x: torch.stack([part * part for part in x.chunk(2, 1)], 1)),
            "PixelShuffle": _around(IMAGE, partial(nn.PixelShuffle, 2)),
            "Upsample nearest": _around(IMAGE, partial(nn.Upsample, scale_factor=2)),
            "Upsample bilinear": _around(IMAGE, partial(nn.Upsample, scale_factor=2, mode="bilinear")),
        },
        "arithmetic": {
            "Linear of sequences": _around(SEQUENCE, partial(nn.Linear, 8, 3)),
            "einsum": _function(IMAGE, lambda x: torch.einsum("bchw,bdhw->bcd", x, x)),
            "reductions": _function(IMAGE, lambda x: x.var((2, 3)) + x.amax((2, 3)) - x.min(2).values.mean(2)),
            "arithmetic": _function(ROW, lambda x: torch.where(x > 0, x.clamp(max=1.0) ** 3, (x * x + 1).sqrt().log())),
            "functions": _function(ROW, lambda x: torch.erf(x) / (x.exp() + 1) + x.abs().log1p() * x.sin()),
        },
        "attention": {
            "attention": _around(SEQUENCE, partial(SelfAttention, causal=False)),
            "attention, causal": _around(SEQUENCE, partial(SelfAttention, causal=True)),
            "attention with dropout": _around(SEQUENCE, partial(SelfAttention, causal=True, dropout=0.3)),
            "scaled dot product": _function(
                IMAGE, lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            ),
            "transformer": _around(
                SEQUENCE,
                partial(nn.TransformerEncoderLayer, 8, 2, 12, dropout=0.0, activation="gelu", batch_first=True),
            ),
        },
        "recurrent": {
            "LSTM": _around(SEQUENCE, partial(nn.LSTM, 8, 4, 2, batch_first=True, dropout=0.2)),
            "LSTM of both directions": _around(SEQUENCE, partial(nn.LSTM, 8, 3, batch_first=True, bidirectional=True)),
            "GRU": _around(SEQUENCE, partial(nn.GRU, 8, 4, batch_first=True)),
            "RNN": _around(SEQUENCE, partial(nn.RNN, 8, 4, batch_first=True)),
        },
        # Changes in place and numbers made on the way, which take PyTorch's slow tracer for everything beside them.
        "traced by PyTorch": {
            "Mish": _around(ROW, nn.Mish),
            "ReLU6 in place": _around(ROW, partial(nn.ReLU6, inplace=True)),
            "SiLU in place": _around(ROW, partial(nn.SiLU, inplace=True)),
            "chosen": _function(IMAGE, lambda x: x[:, [0, 2, 2]] + x[:, 1:2].flip(3)),
        },
    }
)
"""Every kind of layer with real inputs, by group and name, except convolutions and layers with a sample mask."""
TOKENS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"Embedding": partial(Embedded, None), "Embedding with padding": partial(Embedded, 0)}
)
"""Layers with integer inputs."""
GROUPS = (*BRANCHES, "tokens")
SAMPLE = SampleSpec(shape=IMAGE)
TOKEN_SAMPLE = SampleSpec(shape=(5,), dtype="I64", limit=7)


def group_of(name: str) -> tuple[nn.Module, SampleSpec]:
    """A network with every layer of a group, and its sample spec."""
    branches, sample = (TOKENS, TOKEN_SAMPLE) if name == "tokens" else (BRANCHES[name], SAMPLE)
    return SideBySide({branch: build() for branch, build in branches.items()}), sample
