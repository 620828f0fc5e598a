"""Layers and blocks of the families; for transformers see `subfleet.elastic.families.transformer_layers`.

The layers are plain `torch.nn`; the classes here only connect them.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from subfleet.elastic.network import Norm, Role
from subfleet.elastic.recording.functions import divide_by_kept
from subfleet.elastic.recording.markers import Markers
from subfleet.protocol.errors import ConfigError

MakeActivation = Callable[[], nn.Module]
"""Makes an activation, such as `nn.ReLU6`."""
STEP: Mapping[str, Role] = MappingProxyType({"step": "step"})
"""Role of the learnable step of a block."""


class Normed(Protocol):
    """Settings of a network's norms."""

    @property
    def norm(self) -> Norm:
        """Kind of norm."""

    @property
    def group_size(self) -> int:
        """Channels of one group if norm is "group"."""

    @property
    def scaler(self) -> bool:
        """Whether a scaler precedes each norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Creates the layers of a network according to its settings.

    Attributes:
        config: the settings. Layers only have biases without norms, which would cancel them.
        spatial: whether layers are convolutions of images; otherwise they are linear layers of vectors.
        epsilon: constant that BatchNorm adds to the variance.
    """

    config: Normed
    spatial: bool = True
    epsilon: float = 1e-5

    def layer(self, width_in: int, width: int, kernel: int = 1, *, stride: int = 1, groups: int = 1) -> nn.Module:
        """Create a convolution, padded to keep the size at stride 1, or a linear layer.

        Args:
            width_in: input channels.
            width: output channels.
            kernel: odd side of the square kernel; linear layers ignore it, as well as stride and groups.
            stride: stride of the convolution.
            groups: groups of the convolution; the number of channels for a depthwise one.
        """
        bias = self.config.norm == "none"
        if not self.spatial:
            return nn.Linear(width_in, width, bias=bias)
        return nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias)

    def norm(self, width: int) -> nn.Module:
        """Create the norm of these channels, after a scaler if the settings have one."""
        norm = self._norm(width)
        if not self.config.scaler:
            return norm
        return nn.Sequential(OrderedDict(scale=Scale(), norm=norm))

    def normed_layer(
        self,
        widths: tuple[int, int],
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: MakeActivation | None = None,
    ) -> nn.Sequential:
        """Create a layer with its norm, and an activation if given.

        Args:
            widths: input and output channels.
            kernel: as in `layer`.
            stride: as in `layer`.
            groups: as in `layer`.
            activation: creates the activation.
        """
        conv = self.layer(*widths, kernel, stride=stride, groups=groups)
        layers = OrderedDict[str, nn.Module](conv=conv, norm=self.norm(widths[1]))
        if activation is not None:
            layers["activation"] = activation()
        return nn.Sequential(layers)

    def _norm(self, width: int) -> nn.Module:
        match self.config.norm:
            case "group":
                size = self.config.group_size
                if width % size:
                    raise ConfigError(
                        f"a norm has {width} channels, but must have a multiple of group_size {size}; change the widths"
                    )
                return nn.GroupNorm(width // self.config.group_size, width)
            case "batch":
                norm = (nn.BatchNorm2d if self.spatial else nn.BatchNorm1d)(width, eps=self.epsilon)
                # The number of batches would be an integer among the weights, and is not used.
                norm.num_batches_tracked = None
                norm.register_load_state_dict_pre_hook(_without_count)  # type: ignore[no-untyped-call]  # PyTorch's
                return norm
            case _:
                return nn.Identity()


def _without_count(_norm: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # PyTorch adds the number of batches to a state without layer versions.
    state.pop(f"{prefix}num_batches_tracked", None)


class Scale(nn.Module):
    """Divides by the fraction of channels that a submodel keeps, in training only (Diao et al. 2021, section 3.2).

    Args:
        dim: the dimension of the channels.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        channels = x.shape[self.dim]
        return divide_by_kept(x, channels, channels) if self.training else x


class SpatialMean(nn.Module):
    """The mean over height and width; every export target supports the gradient of a plain mean."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels)."""
        return x.mean(dim=(2, 3))


class PreactBlock(nn.Module):
    """A pre-activation residual block of the given layers (He et al. 2016, "Identity mappings", figure 4e).

    It adds `layer2(relu(norm2(layer1(relu(norm1(x))))))` to x; a bottleneck has a third norm and layer. If the shape
    changes, a shortcut layer projects `relu(norm1(x))` in place of x. A learnable step multiplies the added term (Kang
    et al. 2023, "NeFL", section 3.1).
    """

    def __init__(self, *pairs: tuple[nn.Module, nn.Module], shortcut: nn.Module | None, learnable_step: bool) -> None:
        super().__init__()
        self.depth = len(pairs)
        for number, (norm, layer) in enumerate(pairs, start=1):
            self.add_module(f"norm{number}", norm)
            self.add_module(f"layer{number}", layer)
        self.shortcut = shortcut
        self.step = nn.Parameter(torch.ones(1)) if learnable_step else None
        inner = zip(range(1, self.depth), ("inner", "filtered"), strict=False)
        self.markers = Markers(
            axes={(f"layer{number}.weight", 0): (axis,) for number, axis in inner},
            roles={f"layer{self.depth}.weight": "residual", **(STEP if learnable_step else {})},
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input or its projection."""
        active = self._active(1, x)
        shortcut = x if self.shortcut is None else self.shortcut(active)
        added = self._layer(1, active)
        for number in range(2, self.depth + 1):
            added = self._layer(number, self._active(number, added))
        return shortcut + (added if self.step is None else self.step * added)

    def _active(self, number: int, x: Tensor) -> Tensor:
        return nn.functional.relu(self.get_submodule(f"norm{number}")(x))

    def _layer(self, number: int, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(f"layer{number}")(x)
        return y


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all channels (Hu et al. 2018, section 3)."""

    def __init__(self, width: int, squeezed: int, activation: MakeActivation, gate: MakeActivation) -> None:
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
    """Layers that widen, filter and narrow again, with a residual connection if the shape does not change.

    MBConv of MobileNetV2 (Sandler et al. 2018, table 1) and fused MBConv of EfficientNetV2 (Tan and Le 2021, figure 2).
    A learnable step multiplies the added term (Kang et al. 2023, "NeFL", section 3.1).
    """

    def __init__(self, layers: nn.Sequential, *, residual: bool, learnable_step: bool) -> None:
        super().__init__()
        self.layers = layers
        self.residual = residual
        self.step = nn.Parameter(torch.ones(1)) if learnable_step else None
        inner = {"widen": ("layers.widen.conv", "inner"), "squeeze": ("layers.squeeze.squeeze", "squeezed")}
        own = [inner[name] for name, _ in layers.named_children() if name in inner]
        self.markers = Markers(
            axes={(f"{layer}.weight", 0): (axis,) for layer, axis in own},
            kinds={"squeezed": "squeeze"},
            roles=STEP if learnable_step else {},
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels out, height / stride, width / stride)."""
        y: Tensor = self.layers(x)
        if not self.residual:
            return y
        return x + (y if self.step is None else self.step * y)
