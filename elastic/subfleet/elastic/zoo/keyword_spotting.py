"""Depthwise separable networks that hear keywords."""

from collections import OrderedDict

from torch import nn

from subfleet.elastic.zoo.convolution import MakeNorm, classifier, conv_norm

__all__ = ["ds_cnn"]


def ds_cnn(
    *, widths: tuple[int, ...] = (64, 64, 64, 64, 64), class_count: int = 12, norm: MakeNorm = nn.BatchNorm2d
) -> nn.Module:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5, DS-CNN-S).

    Inputs are (batch, 1, 49 frames, 10 MFCC) of one second of speech. Convolutions have no bias, as a norm follows
    (23,180 parameters; MLPerf Tiny counts 23,756 with the biases).

    Args:
        widths: channels of the first convolution, then of each separable layer.
        class_count: keywords, silence and unknown.
        norm: makes each norm.
    """
    # Rows 5 and columns 1 of padding give 25 x 5 positions, as "same" padding does at stride 2.
    stem = nn.Conv2d(1, widths[0], (10, 4), stride=2, padding=(5, 1), bias=False)
    layers = OrderedDict[str, nn.Module](stem=stem, norm=norm(widths[0]), relu=nn.ReLU())
    width_in = widths[0]
    for position, width in enumerate(widths[1:]):
        layers[f"depthwise{position}"] = conv_norm(
            (width_in, width_in), 3, norm=norm, groups=width_in, activation=nn.ReLU
        )
        layers[f"pointwise{position}"] = conv_norm((width_in, width), 1, norm=norm, activation=nn.ReLU)
        width_in = width
    layers["head"] = classifier(width_in, class_count)
    return nn.Sequential(layers)
