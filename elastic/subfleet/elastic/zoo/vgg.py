"""Plain stacks of 3x3 convolutions with max pooling between them."""

from collections import OrderedDict

from torch import nn

from subfleet.elastic.zoo.convolution import MakeNorm, classifier, conv_norm

__all__ = ["VGG13_WIDTHS", "vgg"]

VGG13_WIDTHS = (64, 128, 256, 512, 512)
"""Channels of the five sections of configuration B (Simonyan and Zisserman 2015, table 1)."""


def vgg(
    *,
    input_channels: int = 3,
    widths: tuple[int, ...] = VGG13_WIDTHS,
    depths: tuple[int, ...] = (2, 2, 2, 2, 2),
    class_count: int = 10,
    norm: MakeNorm = nn.BatchNorm2d,
) -> nn.Module:
    """Sections of 3x3 convolutions, each closed by 2x2 max pooling.

    The default is VGG-13 with BatchNorm as used on 32x32 images: one linear layer instead of the three of the paper,
    and no bias before a norm, which would take it away again (9.41 million parameters).

    Args:
        input_channels: of the images.
        widths: channels of each section.
        depths: convolutions of each section.
        class_count: logits of an image.
        norm: makes each norm.
    """
    layers = OrderedDict[str, nn.Module]()
    width_in = input_channels
    for section, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        inside = OrderedDict[str, nn.Module]()
        for position in range(depth):
            inside[f"layer{position}"] = conv_norm((width_in, width), 3, norm=norm, activation=nn.ReLU)
            width_in = width
        inside["pool"] = nn.MaxPool2d(2)
        layers[f"section{section}"] = nn.Sequential(inside)
    layers["head"] = classifier(width_in, class_count)
    return nn.Sequential(layers)
