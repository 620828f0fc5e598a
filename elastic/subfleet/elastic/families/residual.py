"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

They differ in the kind of layers, in strides and in the modules before and after the residual sections. Layers before
norms have no bias.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from subfleet.elastic.families.layers import Layers, PreactBlock, SpatialMean
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks

_BOTTLENECK_FRACTION = 4


def preact_resnet(config: PreactResNet) -> nn.Module:
    """The network of `PreactResNet`; its stem is a 3x3 convolution without pooling, as usual for small images."""
    layers, plans = Layers(config=config), plan_blocks(config, halving=True, keeping="first")
    begin = OrderedDict(stem=layers.layer(config.input_shape[0], plans[0].width_in, 3, stride=config.stem_stride))
    pairs = _pair_bottleneck if config.block == "bottleneck" else _pair_basic
    return _build(config, layers, plans, begin, pairs)


def mlp(config: Mlp) -> nn.Module:
    """The network of `Mlp`."""
    layers, plans = Layers(config=config, spatial=False), plan_blocks(config, keeping="first")
    stem = layers.layer(math.prod(config.input_shape), plans[0].width_in)
    return _build(config, layers, plans, OrderedDict(flatten=nn.Flatten(), stem=stem), _pair_basic)


_Pairs = list[tuple[nn.Module, nn.Module]]


def _build(
    config: Mlp | PreactResNet,
    layers: Layers,
    plans: tuple[BlockPlan, ...],
    modules: "OrderedDict[str, nn.Module]",
    pair: Callable[[Layers, BlockPlan], _Pairs],
) -> nn.Module:
    def make(plan: BlockPlan) -> nn.Module:
        return PreactBlock(
            *pair(layers, plan),
            shortcut=None if plan.keeps else layers.layer(plan.width_in, plan.width, stride=plan.stride),
            learnable_step=config.learnable_steps and plan.position > 0,
        )

    modules.update(build_sections(plans, make))
    width = plans[-1].width
    modules.update(norm=layers.norm(width), relu=nn.ReLU())
    if layers.spatial:
        modules["pool"] = SpatialMean()
    modules["head"] = nn.Linear(width, config.class_count)
    return SectionedNetwork(modules, plans)


def _pair_basic(layers: Layers, plan: BlockPlan) -> _Pairs:
    inner = plan.hidden or plan.width
    return [
        (layers.norm(plan.width_in), layers.layer(plan.width_in, inner, plan.side, stride=plan.stride)),
        (layers.norm(inner), layers.layer(inner, plan.width, plan.side)),
    ]


def _pair_bottleneck(layers: Layers, plan: BlockPlan) -> _Pairs:
    inner = plan.hidden or max(1, plan.width // _BOTTLENECK_FRACTION)
    return [
        (layers.norm(plan.width_in), layers.layer(plan.width_in, inner)),
        (layers.norm(inner), layers.layer(inner, inner, plan.side, stride=plan.stride)),
        (layers.norm(inner), layers.layer(inner, plan.width)),
    ]
