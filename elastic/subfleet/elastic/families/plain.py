"""Networks without residual connections: VGG for images, fully convolutional networks, and keyword spotting.

A submodel may omit layers, so all layers of a section except the first have as many output as input channels. If layers
have widths of their own, a submodel without a layer keeps the same channels of its input and output axes.
"""

from collections import OrderedDict
from functools import partial

from torch import nn

from subfleet.elastic.families.layers import Layers, SpatialMean
from subfleet.elastic.families.records.plain import DsCnn, Fcn, Vgg
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks


def vgg(config: Vgg) -> nn.Module:
    """The network of `Vgg`; it ends with one linear layer instead of the paper's three, as usual for small images."""
    plans = plan_blocks(config, width_in=config.input_shape[0])
    modules = build_sections(plans, partial(_build_layer, Layers(config=config)), close=partial(nn.MaxPool2d, 2))
    modules.update(pool=SpatialMean(), head=nn.Linear(plans[-1].width, config.class_count))
    return SectionedNetwork(modules, plans)


def fcn(config: Fcn) -> nn.Module:
    """The network of `Fcn`; it ends with a linear map of each pixel."""
    plans = plan_blocks(config, width_in=config.input_shape[0])
    modules = build_sections(plans, partial(_build_layer, Layers(config=config)))
    modules["head"] = nn.Conv2d(plans[-1].width, config.class_count, 1)
    return SectionedNetwork(modules, plans)


def ds_cnn(config: DsCnn) -> nn.Module:
    """The network of `DsCnn`."""
    layers, plans = Layers(config=config), plan_blocks(config)
    stem_width = plans[0].width_in
    # Padding of 5 rows and 1 column gives 25 x 5 positions for 49 x 10, like "same" padding at stride 2.
    conv = nn.Conv2d(config.input_shape[0], stem_width, (10, 4), stride=2, padding=(5, 1), bias=config.norm == "none")
    stem = OrderedDict[str, nn.Module](conv=conv, norm=layers.norm(stem_width), activation=nn.ReLU())
    modules = OrderedDict[str, nn.Module](
        stem=nn.Sequential(stem), **build_sections(plans, partial(_build_separable, layers))
    )
    modules.update(pool=SpatialMean(), head=nn.Linear(plans[-1].width, config.class_count))
    return SectionedNetwork(modules, plans)


def _build_layer(layers: Layers, plan: BlockPlan) -> nn.Module:
    """A convolution with its norm and activation."""
    return layers.normed_layer((plan.width_in, plan.width), plan.side, activation=nn.ReLU)


def _build_separable(layers: Layers, plan: BlockPlan) -> nn.Module:
    """A depthwise and a 1x1 convolution."""
    width_in = plan.width_in
    depthwise = layers.normed_layer((width_in, width_in), plan.side, groups=width_in, activation=nn.ReLU)
    pointwise = layers.normed_layer((width_in, plan.width), activation=nn.ReLU)
    return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))
