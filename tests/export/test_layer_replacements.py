"""Layers that a step replaces, and all their gradients, compared with PyTorch's layers in double precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from export.step_rig import step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.targets import find_target
from subfleet.export.tracing import trace
from subfleet.protocol.errors import ExportError


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_replaced(module: nn.Module, *inputs: Any) -> Any:
    with LayerReplacing(LAYERS, LayerContext(torch.ones(inputs[0].shape[0]))):
        return module(*inputs)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in tensors_of(part)]


def assert_same(module: nn.Module, x: Tensor, *arguments: Any) -> None:
    """Compare outputs, and gradients of the input and of every parameter."""
    module = module.double()
    results = []
    for run in (module, partial(run_replaced, module)):
        leaf = x.clone().requires_grad_()
        outputs = tensors_of(run(leaf, *arguments))
        weighted = [(output * draw(*output.shape, seed=index)).sum() for index, output in enumerate(outputs)]
        differentiated = [leaf, *module.parameters()]
        gradients = torch.autograd.grad(torch.stack(weighted).sum(), differentiated, allow_unused=True)
        results.append([*outputs, *gradients])
    for expected, actual in zip(*results, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(nn.LSTM, 4, 3),
    "LSTM of two layers, batch first": partial(nn.LSTM, 4, 3, 2, batch_first=True),
    "LSTM of both directions": partial(nn.LSTM, 4, 3, 2, bidirectional=True),
    "LSTM without bias": partial(nn.LSTM, 4, 3, bias=False),
    "GRU": partial(nn.GRU, 4, 3, batch_first=True),
    "GRU of both directions": partial(nn.GRU, 4, 3, 2, bidirectional=True),
    "GRU without bias": partial(nn.GRU, 4, 3, bias=False),
    "RNN": partial(nn.RNN, 4, 3, 2),
    "RNN with ReLU": partial(nn.RNN, 4, 3, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    assert_same(RECURRENT[name](), draw(2, 5, 4))


def test_recurrent_layers_from_a_given_state() -> None:
    states = (draw(1, 2, 3, seed=1), draw(1, 2, 3, seed=2))
    assert_same(nn.LSTM(4, 3, batch_first=True), draw(2, 5, 4), states)
    assert_same(nn.GRU(4, 3, batch_first=True), draw(2, 5, 4), states[0])


class LastState(nn.Module):
    """Returns only the last cell state of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        cells: Tensor = self.lstm(x)[1][1]
        return cells


def test_recurrent_layers_by_their_last_state_alone() -> None:
    assert_same(LastState(), draw(5, 2, 4))


def test_recurrent_layers_that_are_refused() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(draw(2, 5, 4), torch.tensor([5, 3]), batch_first=True)
    context = LayerContext(torch.ones(2))
    with LayerReplacing(LAYERS, context), pytest.raises(ExportError, match="packed sequences"):
        nn.LSTM(4, 3).double()(packed)
    with pytest.raises(ExportError, match="proj_size"):
        run_replaced(nn.LSTM(4, 3, proj_size=2).double(), draw(2, 5, 4))


class Attending(nn.Module):
    """Self-attention with boolean masks."""

    def __init__(self, *, causal: bool = False, padded: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.causal, self.padded = causal, padded

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        padding = torch.arange(length).expand(x.shape[0], length) >= length - 1 if self.padded else None
        return self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding)


class Crossing(nn.Module):
    """Attention to another sequence, of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x[:, 1:, :3], x[:, 1:, 2:], average_attn_weights=False)


ATTENDING: dict[str, Callable[[], nn.Module]] = {
    "plain": Attending,
    "causal": partial(Attending, causal=True),
    "padded": partial(Attending, padded=True),
    "causal and padded": partial(Attending, causal=True, padded=True),
    "without bias": partial(Attending, bias=False),
    "to another sequence": Crossing,
    "in a transformer": partial(nn.TransformerEncoderLayer, 4, 2, 6, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", ATTENDING)
def test_multi_head_attention(name: str) -> None:
    assert_same(ATTENDING[name](), draw(2, 5, 4))


def test_attention_to_added_keys_is_refused() -> None:
    with pytest.raises(ExportError, match="add_bias_kv"):
        run_replaced(Attending(add_bias_kv=True).double(), draw(2, 5, 4))


class Scored(nn.Module):
    """Scaled dot product attention with a trainable bias."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(draw(1, 4, 1, 5)) if options.pop("biased", False) else None
        self.groups = options.pop("groups", 4)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups
        return functional.scaled_dot_product_attention(
            x, x[:, :groups] * 2, x[:, :groups].sin(), attn_mask=self.bias, **self.options
        )


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"biased": True}, {"groups": 2, "enable_gqa": True, "scale": 0.3}, {"groups": 1}],
    ids=str,
)
def test_scaled_dot_product_attention(options: dict[str, Any]) -> None:
    assert_same(Scored(**options), draw(2, 4, 5, 3))


@pytest.mark.parametrize("normalisation", [nn.RMSNorm(4, eps=1e-3), nn.RMSNorm((5, 4), eps=0.1)])
def test_rms_norm(normalisation: nn.Module) -> None:
    assert_same(normalisation, draw(2, 5, 4))


def test_circular_padding() -> None:
    assert_same(nn.CircularPad2d((1, 2, 0, 3)), draw(2, 3, 5, 4))


LAST = torch.channels_last
TO_ONE: dict[str, tuple[nn.Module, Tensor]] = {
    "of one position": (nn.AdaptiveAvgPool2d(1), draw(2, 3, 1, 1)),
    "of one position, channels last": (nn.AdaptiveAvgPool2d(1), draw(2, 3, 1, 1).to(memory_format=LAST)),
    "channels last": (nn.AdaptiveAvgPool2d((1, 1)), draw(2, 3, 5, 4).to(memory_format=LAST)),
    "without a batch": (nn.AdaptiveAvgPool2d(1), draw(3, 5, 4)),
    "of a line": (nn.AdaptiveAvgPool1d(1), draw(2, 3, 4)),
    "of a volume": (nn.AdaptiveAvgPool3d(1), draw(2, 3, 4, 5, 2)),
    "of one direction alone": (nn.AdaptiveAvgPool2d((1, None)), draw(2, 3, 5, 4)),
}


@pytest.mark.parametrize("name", TO_ONE)
def test_adaptive_average_pooling_to_one(name: str) -> None:
    assert_same(*TO_ONE[name])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [1, 5])
def test_pooling_to_one_leaves_no_word_of_memory(side: int, memory_format: torch.memory_format) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pool, self.head = nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.pool(self.first(x).to(memory_format=memory_format)).flatten(1))
            return logits

    graph = trace(step_of_module(Pooled(), (3, side, side)), find_target("onnx").lowerings)
    assert not [node.name for node in graph.graph.nodes if "as_strided" in str(node.target)]
