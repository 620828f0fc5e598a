"""MobileNetV2 and MobileNetV3-small for small images."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from subfleet.elastic.zoo.convolution import (
    InvertedResidual,
    MakeActivation,
    MakeNorm,
    SqueezeExcitation,
    classifier,
    conv_norm,
    mobile_batch_norm,
    rounded_width,
)

__all__ = ["MOBILENET_V2", "MOBILENET_V3_SMALL", "Bottleneck", "mobilenet_v2", "mobilenet_v3", "scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """One inverted residual block.

    Attributes:
        expanded: channels inside.
        width: channels out.
        kernel: side of the depthwise convolution.
        stride: of the depthwise convolution.
        squeezed: channels inside the squeeze-and-excitation; 0 for none.
        hardswish: hardswish instead of ReLU.
        widens: whether a 1x1 convolution leads to the channels inside; else they are those of the input.
    """

    expanded: int
    width: int
    kernel: int = 3
    stride: int = 1
    squeezed: int = 0
    hardswish: bool = False
    widens: bool = True


def _v2_blocks() -> tuple[Bottleneck, ...]:
    """Sandler et al. 2018, table 2, with strides 1 in place of the first two 2s, as usual for 32x32 images."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    blocks = []
    width_in = 32
    for expansion, width, depth, stride in rows:
        for position in range(depth):
            blocks.append(
                Bottleneck(
                    expanded=width_in * expansion,
                    width=width,
                    stride=1 if position else stride,
                    widens=expansion > 1,
                )
            )
            width_in = width
    return tuple(blocks)


MOBILENET_V2 = _v2_blocks()

MOBILENET_V3_SMALL = (
    Bottleneck(expanded=16, width=16, squeezed=8, widens=False),
    Bottleneck(expanded=72, width=24, stride=2),
    Bottleneck(expanded=88, width=24),
    Bottleneck(expanded=96, width=40, kernel=5, stride=2, squeezed=24, hardswish=True),
    Bottleneck(expanded=240, width=40, kernel=5, squeezed=64, hardswish=True),
    Bottleneck(expanded=240, width=40, kernel=5, squeezed=64, hardswish=True),
    Bottleneck(expanded=120, width=48, kernel=5, squeezed=32, hardswish=True),
    Bottleneck(expanded=144, width=48, kernel=5, squeezed=40, hardswish=True),
    Bottleneck(expanded=288, width=96, kernel=5, stride=2, squeezed=72, hardswish=True),
    Bottleneck(expanded=576, width=96, kernel=5, squeezed=144, hardswish=True),
    Bottleneck(expanded=576, width=96, kernel=5, squeezed=144, hardswish=True),
)
"""Howard et al. 2019, table 2, with strides 1 in place of the first two 2s, as usual for 32x32 images."""


def scaled(blocks: Sequence[Bottleneck], rate: float) -> tuple[Bottleneck, ...]:
    """The blocks at a share of their widths, each rounded to a multiple of 8."""
    return tuple(
        replace(
            block,
            expanded=rounded_width(block.expanded * rate),
            width=rounded_width(block.width * rate),
            squeezed=rounded_width(block.squeezed * rate) if block.squeezed else 0,
        )
        for block in blocks
    )


def mobilenet_v2(
    *,
    input_channels: int = 3,
    stem_width: int = 32,
    blocks: Sequence[Bottleneck] = MOBILENET_V2,
    last_width: int = 1280,
    class_count: int = 10,
    norm: MakeNorm = nn.BatchNorm2d,
) -> nn.Module:
    """MobileNetV2 (Sandler et al. 2018, section 4) without dropout: 2.24 million parameters with 10 classes."""
    layers = OrderedDict[str, nn.Module](
        stem=conv_norm((input_channels, stem_width), 3, norm=norm, activation=nn.ReLU6)
    )
    width_in = stem_width
    for position, block in enumerate(blocks):
        layers[f"block{position}"] = _inverted_residual(block, width_in, norm, nn.ReLU6)
        width_in = block.width
    layers["last"] = conv_norm((width_in, last_width), 1, norm=norm, activation=nn.ReLU6)
    layers["head"] = classifier(last_width, class_count)
    return nn.Sequential(layers)


def mobilenet_v3(
    *,
    input_channels: int = 3,
    stem_width: int = 16,
    blocks: Sequence[Bottleneck] = MOBILENET_V3_SMALL,
    last_widths: tuple[int, int] = (576, 1024),
    class_count: int = 10,
    norm: MakeNorm = mobile_batch_norm,
) -> nn.Module:
    """MobileNetV3-small (Howard et al. 2019, section 5) without dropout: 1.53 million parameters with 10 classes."""
    stem = conv_norm((input_channels, stem_width), 3, norm=norm, activation=nn.Hardswish)
    layers = OrderedDict[str, nn.Module](stem=stem)
    width_in = stem_width
    for position, block in enumerate(blocks):
        activation = nn.Hardswish if block.hardswish else nn.ReLU
        layers[f"block{position}"] = _inverted_residual(block, width_in, norm, activation)
        width_in = block.width
    layers["last"] = conv_norm((width_in, last_widths[0]), 1, norm=norm, activation=nn.Hardswish)
    layers["hidden"] = classifier(*last_widths)
    layers["activation"] = nn.Hardswish()
    layers["head"] = nn.Linear(last_widths[1], class_count)
    return nn.Sequential(layers)


def _inverted_residual(
    block: Bottleneck, width_in: int, norm: MakeNorm, activation: MakeActivation
) -> InvertedResidual:
    expanded = block.expanded if block.widens else width_in
    layers = OrderedDict[str, nn.Module]()
    if block.widens:
        layers["widen"] = conv_norm((width_in, expanded), 1, norm=norm, activation=activation)
    layers["depthwise"] = conv_norm(
        (expanded, expanded), block.kernel, norm=norm, stride=block.stride, groups=expanded, activation=activation
    )
    if block.squeezed:
        layers["squeeze"] = SqueezeExcitation(expanded, block.squeezed, activation=nn.ReLU, gate=nn.Hardsigmoid)
    layers["narrow"] = conv_norm((expanded, block.width), 1, norm=norm)
    return InvertedResidual(nn.Sequential(layers), residual=block.stride == 1 and width_in == block.width)
