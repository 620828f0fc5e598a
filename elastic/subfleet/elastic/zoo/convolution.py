"""What the zoo's convolutional networks are made of: a convolution with norm and activation, and residual blocks.

Every width is an argument of its own, also the ones inside a block, so that a subnet of any widths can be built. The
layers are plain `torch.nn`; the classes here only wire them.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

__all__ = [
    "InvertedResidual",
    "MakeActivation",
    "MakeNorm",
    "PreactBlock",
    "SqueezeExcitation",
    "classifier",
    "conv_norm",
    "group_norm",
    "mobile_batch_norm",
    "rounded_width",
]

MakeNorm = Callable[[int], nn.Module]
"""Makes the normalisation of that many channels, such as `nn.BatchNorm2d` or `group_norm`."""

MakeActivation = Callable[[], nn.Module]
"""Makes an activation, such as `nn.ReLU6`."""


def group_norm(width: int, group_size: int = 4) -> nn.Module:
    """GroupNorm in groups of `group_size` channels (Wu and He 2018)."""
    return nn.GroupNorm(width // group_size, width)


def mobile_batch_norm(width: int) -> nn.Module:
    """BatchNorm with the epsilon of MobileNetV3's and EfficientNetV2's public code."""
    return nn.BatchNorm2d(width, eps=1e-3)


def rounded_width(width: float, divisor: int = 8) -> int:
    """The multiple of `divisor` nearest to a width, but never below 90 % of it (MobileNetV2's public code)."""
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * width else rounded + divisor


def conv_norm(
    widths: tuple[int, int],
    kernel: int,
    *,
    norm: MakeNorm,
    stride: int = 1,
    groups: int = 1,
    activation: MakeActivation | None = None,
) -> nn.Sequential:
    """A convolution without bias, its norm, and its activation if it has one; padded to keep the size at stride 1.

    Args:
        widths: channels in and out.
        kernel: odd side of the square kernel.
        norm: makes the norm.
        stride: of the convolution.
        groups: of the convolution; as many as channels for a depthwise one.
        activation: makes the activation.
    """
    conv = nn.Conv2d(*widths, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    layers = OrderedDict[str, nn.Module](conv=conv, norm=norm(widths[1]))
    if activation is not None:
        layers["activation"] = activation()
    return nn.Sequential(layers)


def classifier(width: int, class_count: int) -> nn.Sequential:
    """Mean over all positions, then one linear layer: (batch, width, height, width) to (batch, classes)."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(OrderedDict(pool=pool, flatten=nn.Flatten(), linear=nn.Linear(width, class_count)))


class PreactBlock(nn.Module):
    """A pre-activation residual block of the layers that it is given (He et al. 2016, "Identity mappings", figure 4e).

    It adds `layer2(relu(norm2(layer1(relu(norm1(x))))))` to x. Where a shortcut layer is given, that projects
    `relu(norm1(x))` and is what is added to, as the shape of x changes there.
    """

    def __init__(
        self, *, norm1: nn.Module, layer1: nn.Module, norm2: nn.Module, layer2: nn.Module, shortcut: nn.Module | None
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.layer1 = layer1
        self.norm2 = norm2
        self.layer2 = layer2
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes to what it was given."""
        active = nn.functional.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.layer2(nn.functional.relu(self.norm2(self.layer1(active))))
        return kept + added


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all (Hu et al. 2018, section 3)."""

    def __init__(self, width: int, squeezed: int, *, activation: MakeActivation, gate: MakeActivation) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(width, squeezed, 1)
        self.activation = activation()
        self.excite = nn.Conv2d(squeezed, width, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        gates: Tensor = self.gate(self.excite(self.activation(self.squeeze(self.pool(x)))))
        return x * gates


class InvertedResidual(nn.Module):
    """Layers that widen, filter and narrow again, with a residual connection where the shape stays.

    MBConv of MobileNetV2 (Sandler et al. 2018, table 1) and fused MBConv of EfficientNetV2 (Tan and Le 2021, figure 2).
    """

    def __init__(self, layers: nn.Sequential, *, residual: bool) -> None:
        super().__init__()
        self.layers = layers
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels out, height / stride, width / stride)."""
        y: Tensor = self.layers(x)
        return x + y if self.residual else y
