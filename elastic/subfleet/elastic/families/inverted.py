"""Networks of inverted residual blocks: MobileNetV2, MobileNetV3 and EfficientNetV2.

A block widens, filters and narrows its channels. It is residual if its input and output have the same shape; the first
block of a section then keeps the previous stream.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from subfleet.elastic.families.layers import InvertedResidual, Layers, MakeActivation, SpatialMean, SqueezeExcitation
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV2, MobileNetV3
from subfleet.elastic.families.sections import (
    BlockAxes,
    BlockPlan,
    MarkedSequence,
    build_sections,
    mark_blocks,
    plan_blocks,
)
from subfleet.elastic.recording.markers import Markers

_AnyInverted = MobileNetV2 | MobileNetV3 | EfficientNetV2
_MOBILE_EPSILON = 1e-3
"""Epsilon of BatchNorm in the public code of MobileNetV3 and EfficientNetV2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InvertedStyle:
    """The differences between the families.

    Attributes:
        expansion: default width inside a block, as a multiple of its input's.
        last: default widths of the layers before the head, as multiples of the last section's.
        epsilon: epsilon of BatchNorm.
        stem: activation of the stem and of the layers before the head.
        early: activation of blocks.
        late: activation of blocks from the second to last halving section on.
        fuses: whether blocks without squeeze-and-excitation widen and filter with one convolution.
        squeeze: activations inside squeeze-and-excitation and of its gate; None without it.
    """

    expansion: int
    last: tuple[int, ...]
    epsilon: float = _MOBILE_EPSILON
    stem: MakeActivation
    early: MakeActivation
    late: MakeActivation
    fuses: bool = False
    squeeze: tuple[MakeActivation, MakeActivation] | None = None


def mobilenet_v2(config: MobileNetV2) -> nn.Module:
    """MobileNetV2 (Sandler et al. 2018, section 4) without dropout.

    Raises:
        ConfigError: a kernel side is even.
    """
    relu6 = nn.ReLU6
    return _build(config, _InvertedStyle(expansion=6, last=(4,), epsilon=1e-5, stem=relu6, early=relu6, late=relu6))


def mobilenet_v3(config: MobileNetV3) -> nn.Module:
    """MobileNetV3 (Howard et al. 2019, section 5) without dropout; its small and large forms only differ in sizes.

    Hardswish is used from the second to last halving section on, as in both of the paper's tables.

    Raises:
        ConfigError: a kernel side is even.
    """
    style = _InvertedStyle(
        expansion=6,
        last=(6, 8),
        stem=nn.Hardswish,
        early=nn.ReLU,
        late=nn.Hardswish,
        squeeze=(nn.ReLU, nn.Hardsigmoid),
    )
    return _build(config, style)


def efficientnet_v2(config: EfficientNetV2) -> nn.Module:
    """EfficientNetV2 (Tan and Le 2021, section 3.3) with SiLU, without dropout and stochastic depth.

    Blocks with squeeze-and-excitation are MBConv, the others fused MBConv.

    Raises:
        ConfigError: a kernel side is even.
    """
    silu = nn.SiLU
    style = _InvertedStyle(
        expansion=4, last=(5,), stem=silu, early=silu, late=silu, fuses=True, squeeze=(silu, nn.Sigmoid)
    )
    return _build(config, style)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """The inside of a block of the full network.

    Attributes:
        width: channels inside.
        squeezed: channels inside squeeze-and-excitation; 0 for none.
        widens: whether the block has a layer that changes the input's width to this one.
        activation: activation of its layers.
    """

    width: int
    squeezed: int
    widens: bool
    activation: MakeActivation


def _plan_insides(
    config: _AnyInverted, style: _InvertedStyle, plans: tuple[BlockPlan, ...]
) -> Iterator[tuple[str, _Inside]]:
    halving = [plan.section for plan in plans if plan.stride > 1]
    late = halving[-2] if len(halving) > 1 else 0
    hidden = expand_to_blocks(config.hidden_widths, config.depths)
    hidden = hidden or tuple(plan.width_in * style.expansion for plan in plans)
    squeezed = () if isinstance(config, MobileNetV2) else expand_to_blocks(config.squeezed_widths, config.depths)
    squeezed = squeezed or (0,) * len(plans)
    for plan, width, inside in zip(plans, hidden, squeezed, strict=True):
        yield (
            plan.name,
            _Inside(
                width=width,
                squeezed=inside,
                widens=width != plan.width_in,
                activation=style.late if plan.section >= late else style.early,
            ),
        )


def _build(config: _AnyInverted, style: _InvertedStyle) -> nn.Module:
    plans = plan_blocks(
        config,
        strides=config.strides or (1, *(2 for _ in config.widths[1:])),
        stem_width=config.stem_width or config.widths[0],
        keeping="all",
        kernels=config.kernels,
    )
    insides = dict(_plan_insides(config, style, plans))
    last = config.last_widths or tuple(config.widths[-1] * factor for factor in style.last)
    layers = Layers(config=config, epsilon=style.epsilon)

    def block(plan: BlockPlan) -> nn.Module:
        inside = insides[plan.name]
        make = _build_fused if style.fuses and not inside.squeezed else partial(_build_separable, style)
        return InvertedResidual(
            nn.Sequential(make(layers, plan, inside)),
            residual=plan.residual,
            learnable_step=config.learnable_steps and plan.position > 0,
        )

    stem_widths = (config.input_shape[0], plans[0].width_in)
    stem = layers.normed_layer(stem_widths, 3, stride=config.stem_stride, activation=style.stem)
    modules = OrderedDict[str, nn.Module](stem=stem, **dict(build_sections(plans, block)))
    modules["last"] = layers.normed_layer((plans[-1].width, last[0]), activation=style.stem)
    modules["pool"] = SpatialMean()
    if len(style.last) > 1:
        modules["hidden"] = nn.Linear(last[0], last[1])
        modules["activation"] = style.stem()
    modules["head"] = nn.Linear(last[len(style.last) - 1], config.class_count)
    return MarkedSequence(modules, _mark(config, style, plans, insides))


def _mark(
    config: _AnyInverted, style: _InvertedStyle, plans: Sequence[BlockPlan], insides: Mapping[str, _Inside]
) -> Markers:
    def axes(plan: BlockPlan) -> BlockAxes:
        inside = insides[plan.name]
        fused = style.fuses and not inside.squeezed
        inner = {"layers.widen.conv": "inner"} if inside.widens else {}
        squeezed = {"layers.squeeze.squeeze": "squeezed"} if inside.squeezed else {}
        filtering = ("widen" if inside.widens else "filter") if fused else "depthwise"
        last = "filter" if fused and not inside.widens else "narrow"
        return BlockAxes(stream=(f"layers.{last}.conv",), inner=inner | squeezed, kernels=(f"layers.{filtering}.conv",))

    return mark_blocks(
        plans,
        axes,
        stem="stem.conv",
        others={"last.conv": "last0", **({"hidden": "last1"} if len(style.last) > 1 else {}), "head": "class"},
        kinds={"squeezed": "squeeze"},
        roles={f"{plan.name}.step": "step" for plan in plans if config.learnable_steps and plan.position},
    )


def _build_separable(
    style: _InvertedStyle, layers: Layers, plan: BlockPlan, inside: _Inside
) -> OrderedDict[str, nn.Module]:
    """A widening 1x1 convolution, a depthwise convolution, squeeze-and-excitation, and a narrowing 1x1 convolution."""
    inner, activation = inside.width, inside.activation
    modules = OrderedDict[str, nn.Module]()
    if inside.widens:
        modules["widen"] = layers.normed_layer((plan.width_in, inner), activation=activation)
    modules["depthwise"] = layers.normed_layer(
        (inner, inner), plan.side, stride=plan.stride, groups=inner, activation=activation
    )
    if inside.squeezed and style.squeeze:
        squeezing, gate = style.squeeze
        modules["squeeze"] = SqueezeExcitation(inner, inside.squeezed, activation=squeezing, gate=gate)
    modules["narrow"] = layers.normed_layer((inner, plan.width))
    return modules


def _build_fused(layers: Layers, plan: BlockPlan, inside: _Inside) -> OrderedDict[str, nn.Module]:
    """A convolution that widens and filters, and one that narrows; a single one if the width does not change."""
    filtering = partial(layers.normed_layer, kernel=plan.side, stride=plan.stride, activation=inside.activation)
    if not inside.widens:
        return OrderedDict(filter=filtering((plan.width_in, plan.width)))
    return OrderedDict(
        widen=filtering((plan.width_in, inside.width)), narrow=layers.normed_layer((inside.width, plan.width))
    )
