"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

One blueprint serves both families; they differ in the kind of a layer, in strides and in what comes before and after
the residual sections. Layers before norms have no bias.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes, check_used
from subfleet.elastic.families.layers import Layers, PreactBlock, SpatialMean
from subfleet.elastic.families.sections import (
    BlockPlan,
    block_plans,
    channel_axis,
    check_image,
    class_axis,
    in_sections,
    kernel_axes,
    kernel_of,
    skippable,
    stream_axes,
)
from subfleet.elastic.network import ModelConfig

__all__ = ["mlp", "preact_resnet"]

_NORMS = ("batch", "group", "none")
_BOTTLENECK_SHARE = 4


def preact_resnet(config: ModelConfig) -> Blueprint:
    """A residual network whose blocks normalise first (He et al. 2016, "Identity mappings", section 4.1).

    The stem is a 3x3 convolution without pooling, as usual for small images. Blocks have two 3x3 convolutions, or, as
    bottlenecks, one between two of 1x1; `widths` are those of the streams, of bottlenecks four times the usual width
    inside. Sections after the first halve height and width unless strides are given.

    Raises:
        ConfigError: the input is no image, or the configuration sets what the family has no use for.
    """
    check_image(config)
    used = ("block", "hidden_widths", "kernels", "strides", "stem_width", "stem_stride", "learnable_steps")
    check_used(config, used, _NORMS)
    strides = (1, *(2 for _ in config.widths[1:]))
    return _blueprint(config, strides, Layers(config=config))


def mlp(config: ModelConfig) -> Blueprint:
    """A residual network of linear layers; inputs of any shape are flattened.

    Raises:
        ConfigError: the configuration sets what the family has no use for.
    """
    check_used(config, ("hidden_widths", "stem_width", "learnable_steps"), _NORMS)
    return _blueprint(config, (1,) * len(config.widths), Layers(config=config, spatial=False))


def _blueprint(config: ModelConfig, strides: tuple[int, ...], layers: Layers) -> Blueprint:
    stem_width = config.stem_width or config.widths[0]
    plans = block_plans(config, strides=strides, stem_width=stem_width, keeping="first")
    last = "layer3" if config.block == "bottleneck" else "layer2"
    return Blueprint(
        axes=(*stream_axes(config, plans), *_inner_axes(config, plans), *kernel_axes(plans), class_axis(config)),
        blocks=skippable(plans),
        build=partial(_build, config, plans, layers),
        roles={f"{plan.name}.{last}.weight": "residual" for plan in plans},
    )


def _inner_axes(config: ModelConfig, plans: tuple[BlockPlan, ...]) -> Iterator[Axis]:
    bottleneck = config.block == "bottleneck"
    usual = tuple(max(1, width // _BOTTLENECK_SHARE) if bottleneck else width for width in config.widths)
    for plan, width in zip(plans, config.of_each_block(config.hidden_widths or usual), strict=True):
        yield channel_axis(config, f"{plan.name}.inner", width)
        if bottleneck:
            yield channel_axis(config, f"{plan.name}.filtered", width)


def _build(config: ModelConfig, plans: tuple[BlockPlan, ...], layers: Layers, sizes: Sizes) -> nn.Module:
    input_size = config.input_shape[0] if layers.spatial else math.prod(config.input_shape)
    modules = OrderedDict[str, nn.Module]()
    if not layers.spatial:
        modules["flatten"] = nn.Flatten()
    modules["stem"] = layers.layer(input_size, sizes[plans[0].stream_in], 3, stride=config.stem_stride)
    modules.update(in_sections(plans, sizes, partial(_block, config, layers, sizes)))
    width = sizes[plans[-1].stream]
    modules.update(norm=layers.norm(width), relu=nn.ReLU())
    if layers.spatial:
        modules["pool"] = SpatialMean()
    modules["head"] = nn.Linear(width, sizes["class"])
    return nn.Sequential(modules)


def _block(config: ModelConfig, layers: Layers, sizes: Sizes, plan: BlockPlan) -> PreactBlock:
    width_in, width, inner = sizes[plan.stream_in], sizes[plan.stream], sizes[f"{plan.name}.inner"]
    kernel = kernel_of(plan, sizes)
    if config.block == "bottleneck":
        filtered = sizes[f"{plan.name}.filtered"]
        pairs = [
            (layers.norm(width_in), layers.layer(width_in, inner)),
            (layers.norm(inner), layers.layer(inner, filtered, kernel, stride=plan.stride)),
            (layers.norm(filtered), layers.layer(filtered, width)),
        ]
    else:
        pairs = [
            (layers.norm(width_in), layers.layer(width_in, inner, kernel, stride=plan.stride)),
            (layers.norm(inner), layers.layer(inner, width, kernel)),
        ]
    return PreactBlock(
        *pairs,
        shortcut=None if plan.residual else layers.layer(width_in, width, stride=plan.stride),
        learnable_step=config.learnable_steps and plan.position > 0,
    )
