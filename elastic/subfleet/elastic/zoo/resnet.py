"""Pre-activation residual networks for small images."""

from collections import OrderedDict

from torch import nn

from subfleet.elastic.zoo.convolution import MakeNorm, PreactBlock, classifier

__all__ = ["RESNET18_WIDTHS", "preact_resnet"]

RESNET18_WIDTHS = (64, 128, 256, 512)
"""Channels of the four sections of ResNet-18 (He et al. 2016, "Deep residual learning", table 1)."""


def preact_resnet(
    *,
    input_channels: int = 3,
    widths: tuple[int, ...] = RESNET18_WIDTHS,
    depths: tuple[int, ...] = (2, 2, 2, 2),
    class_count: int = 10,
    norm: MakeNorm = nn.BatchNorm2d,
) -> nn.Module:
    """A residual network whose blocks normalise first (He et al. 2016, "Identity mappings", section 4.1).

    The default is pre-activation ResNet-18 as used on 32x32 images: the stem is a 3x3 convolution of stride 1 without
    pooling (11.17 million parameters); HeteroFL (Diao et al. 2021, section 4) trains it at widths 1 to 1/16.

    Args:
        input_channels: of the images.
        widths: channels of each section; each section after the first halves height and width.
        depths: blocks of each section.
        class_count: logits of an image.
        norm: makes each norm.
    """
    layers = OrderedDict[str, nn.Module](stem=_conv(input_channels, widths[0], 3, 1))
    width_in = widths[0]
    for section, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        blocks = OrderedDict[str, nn.Module]()
        for position in range(depth):
            stride = 2 if section and not position else 1
            blocks[f"block{position}"] = preact_block((width_in, width, width), stride=stride, norm=norm)
            width_in = width
        layers[f"section{section}"] = nn.Sequential(blocks)
    layers["norm"] = norm(width_in)
    layers["relu"] = nn.ReLU()
    layers["head"] = classifier(width_in, class_count)
    return nn.Sequential(layers)


def preact_block(widths: tuple[int, int, int], *, stride: int, norm: MakeNorm) -> PreactBlock:
    """One block of two 3x3 convolutions; channels in, inside and out."""
    width_in, inner, width = widths
    projects = stride > 1 or width_in != width
    return PreactBlock(
        norm1=norm(width_in),
        layer1=_conv(width_in, inner, 3, stride),
        norm2=norm(inner),
        layer2=_conv(inner, width, 3, 1),
        shortcut=_conv(width_in, width, 1, stride) if projects else None,
    )


def _conv(width_in: int, width: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2, bias=False)
