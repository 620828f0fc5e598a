"""Layers and blocks of which the families consist; those of transformers have a module of their own.

Every width is an argument of its own, also the ones inside a block, so that a submodel of any widths can be built. The
layers are plain `torch.nn`; the classes here only wire them.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.families.blueprint import fraction_of
from subfleet.elastic.families.sections import Normed

EPSILON = 1e-5
"""That BatchNorm adds to the variance, where a family does not say otherwise."""
MakeActivation = Callable[[], nn.Module]
"""Makes an activation, such as `nn.ReLU6`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Makes the layers of a network in the way that its settings ask for.

    Attributes:
        config: the settings. Layers have biases where there are no norms, which would take
            them away again.
        spatial: convolutions of images; else linear layers of vectors.
        epsilon: added to the variance by BatchNorm.
    """

    config: Normed
    spatial: bool = True
    epsilon: float = EPSILON

    def layer(self, width_in: int, width: int, kernel: int = 1, *, stride: int = 1, groups: int = 1) -> nn.Module:
        """A convolution, padded to keep the size at stride 1, or a linear layer.

        Args:
            width_in: channels in.
            width: channels out.
            kernel: odd side of the square kernel; of no meaning for linear layers, as are stride and groups.
            stride: of the convolution.
            groups: of the convolution; as many as channels for a depthwise one.
        """
        bias = self.config.norm == "none"
        if not self.spatial:
            return nn.Linear(width_in, width, bias=bias)
        return nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias)

    def norm(self, width: int) -> nn.Module:
        """The normalisation of that many channels, behind a scaler if the configuration has one."""
        norm = self._norm(width)
        if not self.config.scaler:
            return norm
        return nn.Sequential(OrderedDict(scale=Scale(fraction_of(width)), norm=norm))

    def normed_layer(
        self,
        widths: tuple[int, int],
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: MakeActivation | None = None,
    ) -> nn.Sequential:
        """A layer, its norm, and its activation if it has one.

        Args:
            widths: channels in and out.
            kernel: as in `layer`.
            stride: as in `layer`.
            groups: as in `layer`.
            activation: makes the activation.
        """
        conv = self.layer(*widths, kernel, stride=stride, groups=groups)
        layers = OrderedDict[str, nn.Module](conv=conv, norm=self.norm(widths[1]))
        if activation is not None:
            layers["activation"] = activation()
        return nn.Sequential(layers)

    def _norm(self, width: int) -> nn.Module:
        match self.config.norm:
            case "group":
                return nn.GroupNorm(width // self.config.group_size, width)
            case "batch":
                norm = (nn.BatchNorm2d if self.spatial else nn.BatchNorm1d)(width, eps=self.epsilon)
                # The count of batches would be an integer among weights, and nothing reads it.
                norm.num_batches_tracked = None
                norm.register_load_state_dict_pre_hook(_without_count)  # type: ignore[no-untyped-call]  # PyTorch's
                return norm
            case _:
                return nn.Identity()


def _without_count(_norm: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # PyTorch adds a count of batches to every state that comes without the version of its layers.
    state.pop(f"{prefix}num_batches_tracked", None)


class Scale(nn.Module):
    """Divides by the fraction of an axis that a submodel keeps, while it trains (Diao et al. 2021, section 3.2)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x / self.rate if self.training and self.rate != 1 else x


class SpatialMean(nn.Module):
    """The mean over height and width. A plain mean, whose gradient every export target has."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels)."""
        return x.mean(dim=(2, 3))


class ChannelsLast(nn.Module):
    """Channels behind height and width, so that what is linear in them has outputs of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, height, width, channels)."""
        return x.permute(0, 2, 3, 1)


class PreactBlock(nn.Module):
    """A pre-activation residual block of the layers that it is given (He et al. 2016, "Identity mappings", figure 4e).

    It adds `layer2(relu(norm2(layer1(relu(norm1(x))))))` to x, of a bottleneck with a third norm and layer behind that.
    Where a shortcut layer is given, that projects `relu(norm1(x))` and is what is added to, as the shape of x changes
    there. Where it has a step, that multiplies what is added (Kang et al. 2023, "NeFL", section 3.1).
    """

    def __init__(self, *pairs: tuple[nn.Module, nn.Module], shortcut: nn.Module | None, learnable_step: bool) -> None:
        super().__init__()
        self.depth = len(pairs)
        for number, (norm, layer) in enumerate(pairs, start=1):
            self.add_module(f"norm{number}", norm)
            self.add_module(f"layer{number}", layer)
        self.shortcut = shortcut
        self.step = nn.Parameter(torch.ones(1)) if learnable_step else None

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes to what it was given."""
        active = self._active(1, x)
        kept = x if self.shortcut is None else self.shortcut(active)
        added = self._layer(1, active)
        for number in range(2, self.depth + 1):
            added = self._layer(number, self._active(number, added))
        return kept + (added if self.step is None else self.step * added)

    def _active(self, number: int, x: Tensor) -> Tensor:
        return nn.functional.relu(self.get_submodule(f"norm{number}")(x))

    def _layer(self, number: int, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(f"layer{number}")(x)
        return y


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all (Hu et al. 2018, section 3)."""

    def __init__(self, width: int, squeezed: int, *, activation: MakeActivation, gate: MakeActivation) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, squeezed, 1)
        self.activation = activation()
        self.excite = nn.Conv2d(squeezed, width, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        means = x.mean(dim=(2, 3), keepdim=True)
        gates: Tensor = self.gate(self.excite(self.activation(self.squeeze(means))))
        return x * gates


class InvertedResidual(nn.Module):
    """Layers that widen, filter and narrow again, with a residual connection where the shape stays.

    MBConv of MobileNetV2 (Sandler et al. 2018, table 1) and fused MBConv of EfficientNetV2 (Tan and Le 2021, figure 2).
    Where it has a step, that multiplies what is added (Kang et al. 2023, "NeFL", section 3.1).
    """

    def __init__(self, layers: nn.Sequential, *, residual: bool, learnable_step: bool) -> None:
        super().__init__()
        self.layers = layers
        self.residual = residual
        self.step = nn.Parameter(torch.ones(1)) if learnable_step else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels out, height / stride, width / stride)."""
        y: Tensor = self.layers(x)
        if not self.residual:
            return y
        return x + (y if self.step is None else self.step * y)
