"""Networks without residual connections: VGG for images, fully convolutional networks, and keyword spotting.

A submodel may omit layers, so all layers of a section except the first have as many output as input channels. If layers
have widths of their own, a submodel without a layer keeps the same channels of its input and output axes.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

from torch import nn

from subfleet.elastic.families.layers import Layers, SpatialMean
from subfleet.elastic.families.records.plain import DsCnn, Fcn, Vgg
from subfleet.elastic.families.sections import (
    BlockAxes,
    BlockPlan,
    MarkedSequence,
    build_sections,
    mark_blocks,
    plan_blocks,
    with_layer_widths,
)
from subfleet.elastic.recording.markers import Markers

_LAYER = BlockAxes(stream=("conv",), inner={}, kernels=("conv",))
_SEPARABLE = BlockAxes(stream=("pointwise.conv",), inner={}, kernels=("depthwise.conv",))


def vgg(config: Vgg) -> nn.Module:
    """Sections of 3x3 convolutions, each followed by 2x2 max pooling (Simonyan and Zisserman 2015, section 2.1).

    It ends with one linear layer instead of the paper's three, as usual for small images.

    Raises:
        ConfigError: a kernel side is even.
    """
    plans = _plan_blocks(config, config.input_shape[0])
    close = partial(nn.MaxPool2d, 2)
    modules = OrderedDict[str, nn.Module](build_sections(plans, partial(_build_layer, config), close=close))
    modules.update(pool=SpatialMean(), head=nn.Linear(plans[-1].width, config.class_count))
    return MarkedSequence(modules, _mark(plans, _LAYER))


def fcn(config: Fcn) -> nn.Module:
    """Sections of 3x3 convolutions at full resolution, and a linear map of each pixel (Long et al. 2015, section 3).

    Raises:
        ConfigError: a kernel side is even.
    """
    plans = _plan_blocks(config, config.input_shape[0])
    modules = OrderedDict[str, nn.Module](build_sections(plans, partial(_build_layer, config)))
    modules["head"] = nn.Conv2d(plans[-1].width, config.class_count, 1)
    return MarkedSequence(modules, _mark(plans, _LAYER))


def ds_cnn(config: DsCnn) -> nn.Module:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5).

    Inputs are (1, frames, coefficients), such as 49 frames of 10 MFCC for one second of speech.

    Raises:
        ConfigError: a kernel side is even.
    """
    plans, layers = _plan_blocks(config, config.stem_width or config.widths[0]), Layers(config=config)

    def block(plan: BlockPlan) -> nn.Module:
        width_in = plan.width_in
        depthwise = layers.normed_layer((width_in, width_in), plan.side, groups=width_in, activation=nn.ReLU)
        pointwise = layers.normed_layer((width_in, plan.width), activation=nn.ReLU)
        return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))

    stem_width = plans[0].width_in
    # Padding of 5 rows and 1 column gives 25 x 5 positions for 49 x 10, like "same" padding at stride 2.
    conv = nn.Conv2d(config.input_shape[0], stem_width, (10, 4), stride=2, padding=(5, 1), bias=config.norm == "none")
    stem = OrderedDict[str, nn.Module](conv=conv, norm=layers.norm(stem_width), activation=nn.ReLU())
    modules = OrderedDict[str, nn.Module](stem=nn.Sequential(stem))
    modules.update(build_sections(plans, block))
    modules.update(pool=SpatialMean(), head=nn.Linear(plans[-1].width, config.class_count))
    return MarkedSequence(modules, _mark(plans, _SEPARABLE, stem="stem.conv"))


def _plan_blocks(config: Vgg | Fcn | DsCnn, stem_width: int) -> tuple[BlockPlan, ...]:
    ones = (1,) * len(config.widths)
    plans = plan_blocks(config, strides=ones, stem_width=stem_width, keeping="none", kernels=config.kernels)
    return with_layer_widths(plans, config.layer_widths) if config.layer_widths else plans


def _build_layer(config: Any, plan: BlockPlan) -> nn.Module:
    """A convolution with its norm and activation."""
    return Layers(config=config).normed_layer((plan.width_in, plan.width), plan.side, activation=nn.ReLU)


def _mark(plans: tuple[BlockPlan, ...], axes: BlockAxes, *, stem: str = "") -> Markers:
    return mark_blocks(plans, lambda plan: axes, stem=stem, others={"head": "class"}, kinds={}, roles={})
