"""EfficientNetV2 for small images."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from subfleet.elastic.zoo.convolution import (
    InvertedResidual,
    MakeNorm,
    SqueezeExcitation,
    classifier,
    conv_norm,
    mobile_batch_norm,
)

__all__ = ["EFFICIENTNET_V2_S", "EFFICIENTNET_V2_TINY", "Stage", "efficientnet_v2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks of one kind.

    Attributes:
        fused: fused MBConv, where one 3x3 convolution widens and filters; else MBConv with squeeze-and-excitation.
        expansion: channels inside a block by channels in.
        width: channels out.
        depth: blocks.
        stride: of the first block.
    """

    fused: bool
    expansion: int
    width: int
    depth: int
    stride: int


EFFICIENTNET_V2_S = (
    Stage(fused=True, expansion=1, width=24, depth=2, stride=1),
    Stage(fused=True, expansion=4, width=48, depth=4, stride=2),
    Stage(fused=True, expansion=4, width=64, depth=4, stride=2),
    Stage(fused=False, expansion=4, width=128, depth=6, stride=2),
    Stage(fused=False, expansion=6, width=160, depth=9, stride=1),
    Stage(fused=False, expansion=6, width=256, depth=15, stride=2),
)
"""Tan and Le 2021, table 4. Its stem has 24 channels."""

EFFICIENTNET_V2_TINY = (
    Stage(fused=True, expansion=1, width=16, depth=1, stride=1),
    Stage(fused=True, expansion=4, width=32, depth=2, stride=2),
    Stage(fused=True, expansion=4, width=48, depth=2, stride=2),
    Stage(fused=False, expansion=4, width=64, depth=2, stride=2),
    Stage(fused=False, expansion=6, width=80, depth=2, stride=1),
    Stage(fused=False, expansion=6, width=128, depth=2, stride=1),
)
"""The same kinds of stages, narrower and shallower, with the last stride left out for 32x32 images."""


def efficientnet_v2(
    *,
    input_channels: int = 3,
    stem_width: int = 16,
    stages: Sequence[Stage] = EFFICIENTNET_V2_TINY,
    last_width: int = 640,
    class_count: int = 10,
    norm: MakeNorm = mobile_batch_norm,
) -> nn.Module:
    """EfficientNetV2 (Tan and Le 2021, section 3.3) with SiLU, without dropout and stochastic depth.

    Args:
        input_channels: of the images.
        stem_width: channels of the first convolution, here of stride 1; the paper has 2 for large images.
        stages: of blocks.
        last_width: channels of the 1x1 convolution before the mean.
        class_count: logits of an image.
        norm: makes each norm.
    """
    stem = conv_norm((input_channels, stem_width), 3, norm=norm, activation=nn.SiLU)
    layers = OrderedDict[str, nn.Module](stem=stem)
    width_in = stem_width
    for number, stage in enumerate(stages):
        blocks = OrderedDict[str, nn.Module]()
        for position in range(stage.depth):
            block = fused_block if stage.fused else separable_block
            stride = 1 if position else stage.stride
            expanded = width_in * stage.expansion
            blocks[f"block{position}"] = block((width_in, expanded, stage.width), stride=stride, norm=norm)
            width_in = stage.width
        layers[f"stage{number}"] = nn.Sequential(blocks)
    layers["last"] = conv_norm((width_in, last_width), 1, norm=norm, activation=nn.SiLU)
    layers["head"] = classifier(last_width, class_count)
    return nn.Sequential(layers)


def fused_block(widths: tuple[int, int, int], *, stride: int, norm: MakeNorm) -> InvertedResidual:
    """Fused MBConv; channels in, inside and out. Where the inside is no wider, one convolution does all."""
    width_in, expanded, width = widths
    layers = OrderedDict[str, nn.Module]()
    if expanded == width_in:
        layers["filter"] = conv_norm((width_in, width), 3, norm=norm, stride=stride, activation=nn.SiLU)
    else:
        layers["widen"] = conv_norm((width_in, expanded), 3, norm=norm, stride=stride, activation=nn.SiLU)
        layers["narrow"] = conv_norm((expanded, width), 1, norm=norm)
    return InvertedResidual(nn.Sequential(layers), residual=stride == 1 and width_in == width)


def separable_block(widths: tuple[int, int, int], *, stride: int, norm: MakeNorm) -> InvertedResidual:
    """MBConv; channels in, inside and out. Squeezes to a quarter of the channels in."""
    width_in, expanded, width = widths
    squeeze = SqueezeExcitation(expanded, max(1, width_in // 4), activation=nn.SiLU, gate=nn.Sigmoid)
    layers = OrderedDict[str, nn.Module](
        widen=conv_norm((width_in, expanded), 1, norm=norm, activation=nn.SiLU),
        depthwise=conv_norm((expanded, expanded), 3, norm=norm, stride=stride, groups=expanded, activation=nn.SiLU),
        squeeze=squeeze,
        narrow=conv_norm((expanded, width), 1, norm=norm),
    )
    return InvertedResidual(nn.Sequential(layers), residual=stride == 1 and width_in == width)
