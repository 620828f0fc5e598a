"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

Both families share one blueprint; they differ in the kind of layers, in strides and in the modules before and after the
residual sections. Layers before norms have no bias.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.layers import Layers, PreactBlock, SpatialMean
from subfleet.elastic.families.records.blocks import expand_to_blocks
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.families.sections import (
    BlockPlan,
    build_sections,
    channel_axis,
    class_axis,
    kernel_axes,
    kernel_of,
    plan_blocks,
    skippable,
    stream_axes,
)

_BOTTLENECK_FRACTION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResidualStyle:
    """The differences between the families.

    Attributes:
        layers: creates the layers.
        strides: stride of each section.
        kernels: side of the kernels of each section, if given.
        stem_stride: stride of the first layer.
        bottleneck: whether blocks are bottlenecks.
    """

    layers: Layers
    strides: tuple[int, ...]
    kernels: tuple[int, ...] = ()
    stem_stride: int = 1
    bottleneck: bool = False


def preact_resnet(config: PreactResNet) -> Blueprint:
    """A pre-activation residual network (He et al. 2016, "Identity mappings", section 4.1).

    The stem is a 3x3 convolution without pooling, as usual for small images. Blocks have two 3x3 convolutions;
    bottlenecks have one between two 1x1 convolutions. `widths` are the widths of the streams, for bottlenecks four
    times the usual width inside. Sections after the first halve height and width unless strides are given.

    Raises:
        ConfigError: a kernel side is even.
    """
    style = _ResidualStyle(
        layers=Layers(config=config),
        strides=config.strides or (1, *(2 for _ in config.widths[1:])),
        kernels=config.kernels,
        stem_stride=config.stem_stride,
        bottleneck=config.block == "bottleneck",
    )
    return _blueprint(config, style)


def mlp(config: Mlp) -> Blueprint:
    """A residual network of linear layers; inputs of any shape are flattened."""
    return _blueprint(
        config, _ResidualStyle(layers=Layers(config=config, spatial=False), strides=(1,) * len(config.widths))
    )


def _blueprint(config: Mlp | PreactResNet, style: _ResidualStyle) -> Blueprint:
    stem_width = config.stem_width or config.widths[0]
    plans = plan_blocks(config, strides=style.strides, stem_width=stem_width, keeping="first", kernels=style.kernels)
    last = "layer3" if style.bottleneck else "layer2"
    inner = _inner_axes(config, style, plans)
    return Blueprint(
        axes=(*stream_axes(config, plans), *inner, *kernel_axes(plans), class_axis(config)),
        blocks=skippable(plans),
        build=partial(_build, config, style, plans),
        roles={f"{plan.name}.{last}.weight": "residual" for plan in plans},
        group_size=config.group_size,
    )


def _inner_axes(config: Mlp | PreactResNet, style: _ResidualStyle, plans: tuple[BlockPlan, ...]) -> Iterator[Axis]:
    share = _BOTTLENECK_FRACTION if style.bottleneck else 1
    usual = tuple(max(1, width // share) for width in config.widths)
    for plan, width in zip(plans, expand_to_blocks(config.hidden_widths or usual, config.depths), strict=True):
        yield channel_axis(config, f"{plan.name}.inner", width)
        if style.bottleneck:
            yield channel_axis(config, f"{plan.name}.filtered", width)


def _build(config: Mlp | PreactResNet, style: _ResidualStyle, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    layers = style.layers
    input_size = config.input_shape[0] if layers.spatial else math.prod(config.input_shape)
    modules = OrderedDict[str, nn.Module]()
    if not layers.spatial:
        modules["flatten"] = nn.Flatten()
    modules["stem"] = layers.layer(input_size, sizes[plans[0].stream_in], 3, stride=style.stem_stride)
    modules.update(build_sections(plans, sizes, partial(_block, config, style, sizes)))
    width = sizes[plans[-1].stream]
    modules.update(norm=layers.norm(width), relu=nn.ReLU())
    if layers.spatial:
        modules["pool"] = SpatialMean()
    modules["head"] = nn.Linear(width, sizes["class"])
    return nn.Sequential(modules)


def _block(config: Mlp | PreactResNet, style: _ResidualStyle, sizes: Sizes, plan: BlockPlan) -> PreactBlock:
    layers = style.layers
    width_in, width, inner = sizes[plan.stream_in], sizes[plan.stream], sizes[f"{plan.name}.inner"]
    kernel = kernel_of(plan, sizes)
    if style.bottleneck:
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
