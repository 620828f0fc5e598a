"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

They differ in the kind of layers, in strides and in the modules before and after the residual sections. Layers before
norms have no bias.
"""

import math
from collections import OrderedDict

from torch import nn

from subfleet.elastic.families.layers import Layers, PreactBlock, SpatialMean
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks

_BOTTLENECK_FRACTION = 4


def preact_resnet(config: PreactResNet) -> nn.Module:
    """The network of `PreactResNet`; its stem is a 3x3 convolution without pooling, as usual for small images."""
    layers, stem_width = Layers(config=config), config.stem_width or config.widths[0]
    begin = OrderedDict(stem=layers.layer(config.input_shape[0], stem_width, 3, stride=config.stem_stride))
    strides = config.strides or (1, *(2 for _ in config.widths[1:]))
    return _build(config, layers, begin, strides, bottleneck=config.block == "bottleneck")


def mlp(config: Mlp) -> nn.Module:
    """The network of `Mlp`."""
    layers, stem_width = Layers(config=config, spatial=False), config.stem_width or config.widths[0]
    stem = layers.layer(math.prod(config.input_shape), stem_width)
    return _build(config, layers, OrderedDict(flatten=nn.Flatten(), stem=stem), (), bottleneck=False)


def _build(
    config: Mlp | PreactResNet,
    layers: Layers,
    modules: "OrderedDict[str, nn.Module]",
    strides: tuple[int, ...],
    *,
    bottleneck: bool,
) -> nn.Module:
    stem_width = config.stem_width or config.widths[0]
    plans = plan_blocks(config, stem_width=stem_width, strides=strides, keeping="first")
    usual = tuple(max(1, width // (_BOTTLENECK_FRACTION if bottleneck else 1)) for width in config.widths)
    inner = dict(zip(plans, expand_to_blocks(config.hidden_widths or usual, config.depths), strict=True))

    def make(plan: BlockPlan) -> nn.Module:
        pair = _pair_bottleneck if bottleneck else _pair_basic
        return PreactBlock(
            *pair(layers, plan, inner[plan]),
            shortcut=None if plan.keeps else layers.layer(plan.width_in, plan.width, stride=plan.stride),
            learnable_step=config.learnable_steps and plan.position > 0,
        )

    modules.update(build_sections(plans, make))
    width = plans[-1].width
    modules.update(norm=layers.norm(width), relu=nn.ReLU())
    if layers.spatial:
        modules["pool"] = SpatialMean()
    modules["head"] = nn.Linear(width, config.class_count)
    return SectionedNetwork(modules, plans, cuts_kernels=bool(getattr(config, "kernels", ())))


_Pairs = list[tuple[nn.Module, nn.Module]]


def _pair_basic(layers: Layers, plan: BlockPlan, inner: int) -> _Pairs:
    return [
        (layers.norm(plan.width_in), layers.layer(plan.width_in, inner, plan.side, stride=plan.stride)),
        (layers.norm(inner), layers.layer(inner, plan.width, plan.side)),
    ]


def _pair_bottleneck(layers: Layers, plan: BlockPlan, inner: int) -> _Pairs:
    return [
        (layers.norm(plan.width_in), layers.layer(plan.width_in, inner)),
        (layers.norm(inner), layers.layer(inner, inner, plan.side, stride=plan.stride)),
        (layers.norm(inner), layers.layer(inner, plan.width)),
    ]
