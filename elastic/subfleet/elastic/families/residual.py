"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

They differ in the kind of layers, in strides and in the modules before and after the residual sections. Layers before
norms have no bias.
"""

import math
from collections import OrderedDict
from functools import partial

from torch import nn

from subfleet.elastic.families.layers import Layers, PreactBlock, SpatialMean
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.families.sections import (
    BlockAxes,
    BlockPlan,
    MarkedSequence,
    build_sections,
    mark_blocks,
    plan_blocks,
)

_BOTTLENECK_FRACTION = 4
_AXES = {
    "basic": BlockAxes(stream=("layer2",), inner={"layer1": "inner"}, kernels=("layer1", "layer2")),
    "bottleneck": BlockAxes(stream=("layer3",), inner={"layer1": "inner", "layer2": "filtered"}, kernels=("layer2",)),
}


def preact_resnet(config: PreactResNet) -> nn.Module:
    """A pre-activation residual network (He et al. 2016, "Identity mappings", section 4.1).

    The stem is a 3x3 convolution without pooling, as usual for small images. Blocks have two 3x3 convolutions;
    bottlenecks have one between two 1x1 convolutions. `widths` are the widths of the streams, for bottlenecks four
    times the usual width inside. Sections after the first halve height and width unless strides are given.

    Raises:
        ConfigError: a kernel side is even.
    """
    strides = config.strides or (1, *(2 for _ in config.widths[1:]))
    layers, kind = Layers(config=config), config.block
    plans = plan_blocks(
        config,
        strides=strides,
        stem_width=config.stem_width or config.widths[0],
        keeping="first",
        kernels=config.kernels,
    )
    stem = layers.layer(config.input_shape[0], plans[0].width_in, 3, stride=config.stem_stride)
    ends = OrderedDict[str, nn.Module](pool=SpatialMean())
    return _build(config, layers, plans, kind=kind, begin=OrderedDict[str, nn.Module](stem=stem), ends=ends)


def mlp(config: Mlp) -> nn.Module:
    """A residual network of linear layers; inputs of any shape are flattened."""
    layers = Layers(config=config, spatial=False)
    plans = plan_blocks(
        config,
        strides=(1,) * len(config.widths),
        stem_width=config.stem_width or config.widths[0],
        keeping="first",
    )
    stem = layers.layer(math.prod(config.input_shape), plans[0].width_in)
    begin = OrderedDict[str, nn.Module](flatten=nn.Flatten(), stem=stem)
    return _build(config, layers, plans, kind="basic", begin=begin, ends=OrderedDict())


def _build(
    config: Mlp | PreactResNet,
    layers: Layers,
    plans: tuple[BlockPlan, ...],
    *,
    kind: str,
    begin: "OrderedDict[str, nn.Module]",
    ends: "OrderedDict[str, nn.Module]",
) -> nn.Module:
    share = _BOTTLENECK_FRACTION if kind == "bottleneck" else 1
    usual = tuple(max(1, width // share) for width in config.widths)
    widths = expand_to_blocks(config.hidden_widths or usual, config.depths)
    inner = {plan.name: width for plan, width in zip(plans, widths, strict=True)}
    modules = begin
    modules.update(build_sections(plans, partial(_build_block, config, layers, kind, inner)))
    width = plans[-1].width
    modules.update(norm=layers.norm(width), relu=nn.ReLU(), **ends, head=nn.Linear(width, config.class_count))
    last = _AXES[kind].stream[0]
    stepped = [plan.name for plan in plans if config.learnable_steps and plan.position]
    markers = mark_blocks(
        plans,
        lambda plan: _AXES[kind],
        stem="stem",
        others={"head": "class"},
        kinds={},
        roles={
            **dict.fromkeys((f"{plan.name}.{last}.weight" for plan in plans), "residual"),
            **dict.fromkeys((f"{name}.step" for name in stepped), "step"),
        },
    )
    return MarkedSequence(modules, markers)


def _build_block(
    config: Mlp | PreactResNet, layers: Layers, kind: str, inner_widths: dict[str, int], plan: BlockPlan
) -> PreactBlock:
    width_in, width, inner = plan.width_in, plan.width, inner_widths[plan.name]
    if kind == "bottleneck":
        pairs = [
            (layers.norm(width_in), layers.layer(width_in, inner)),
            (layers.norm(inner), layers.layer(inner, inner, plan.side, stride=plan.stride)),
            (layers.norm(inner), layers.layer(inner, width)),
        ]
    else:
        pairs = [
            (layers.norm(width_in), layers.layer(width_in, inner, plan.side, stride=plan.stride)),
            (layers.norm(inner), layers.layer(inner, width, plan.side)),
        ]
    return PreactBlock(
        *pairs,
        shortcut=None if plan.residual else layers.layer(width_in, width, stride=plan.stride),
        learnable_step=config.learnable_steps and plan.position > 0,
    )
