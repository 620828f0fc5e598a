"""Networks of inverted residual blocks: MobileNetV2, MobileNetV3 and EfficientNetV2.

A block widens, filters and narrows its channels. It is residual if its input and output have the same shape; the first
block of a section then keeps the previous stream.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from torch import nn

from subfleet.elastic.families.layers import InvertedResidual, Layers, MakeActivation, SpatialMean, SqueezeExcitation
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV2, MobileNetV3
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks
from subfleet.elastic.recording.markers import Markers

_AnyInverted = MobileNetV2 | MobileNetV3 | EfficientNetV2
_MOBILE_EPSILON = 1e-3
"""Epsilon of BatchNorm in the public code of MobileNetV3 and EfficientNetV2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """The differences between the families.

    Attributes:
        expansion: default width inside a block, as a multiple of its input's.
        last: default widths of the layers before the head, as multiples of the last section's.
        epsilon: epsilon of BatchNorm.
        stem: activation of the stem and of the layers before the head.
        early: activation of blocks.
        late: activation of blocks from the second to last halving section on.
        fuses: whether blocks without squeeze-and-excitation widen and filter with one convolution.
        squeeze: activations inside squeeze-and-excitation and of its gate.
    """

    expansion: int
    last: tuple[int, ...]
    epsilon: float = _MOBILE_EPSILON
    stem: MakeActivation
    early: MakeActivation
    late: MakeActivation
    fuses: bool = False
    squeeze: tuple[MakeActivation, MakeActivation] = (nn.ReLU, nn.Sigmoid)


def mobilenet_v2(config: MobileNetV2) -> nn.Module:
    """The network of `MobileNetV2`."""
    relu6 = nn.ReLU6
    return _build(config, _Style(expansion=6, last=(4,), epsilon=1e-5, stem=relu6, early=relu6, late=relu6))


def mobilenet_v3(config: MobileNetV3) -> nn.Module:
    """The network of `MobileNetV3`; Hardswish is used late, as in both of the paper's tables."""
    hardswish, gate = nn.Hardswish, nn.Hardsigmoid
    style = _Style(expansion=6, last=(6, 8), stem=hardswish, early=nn.ReLU, late=hardswish, squeeze=(nn.ReLU, gate))
    return _build(config, style)


def efficientnet_v2(config: EfficientNetV2) -> nn.Module:
    """The network of `EfficientNetV2`: blocks with squeeze-and-excitation are MBConv, the others fused MBConv."""
    silu = nn.SiLU
    style = _Style(expansion=4, last=(5,), stem=silu, early=silu, late=silu, fuses=True, squeeze=(silu, nn.Sigmoid))
    return _build(config, style)


def _build(config: _AnyInverted, style: _Style) -> nn.Module:
    plans, layers = plan_blocks(config, halving=True, keeping="all"), Layers(config=config, epsilon=style.epsilon)
    halving = [plan.section for plan in plans if plan.stride > 1]
    late = halving[-2] if len(halving) > 1 else 0

    def make(plan: BlockPlan) -> nn.Module:
        inner = plan.hidden or plan.width_in * style.expansion
        activation = style.late if plan.section >= late else style.early
        if style.fuses and not plan.squeezed:
            inside = _build_fused(layers, plan, inner, activation)
        else:
            inside = _build_separable(layers, plan, inner, activation, style.squeeze)
        return InvertedResidual(
            nn.Sequential(inside), residual=plan.keeps, learnable_step=config.learnable_steps and plan.position > 0
        )

    widths = (config.input_shape[0], plans[0].width_in)
    stem = layers.normed_layer(widths, 3, stride=config.stem_stride, activation=style.stem)
    last = config.last_widths or tuple(config.widths[-1] * factor for factor in style.last)
    modules = OrderedDict[str, nn.Module](stem=stem, **build_sections(plans, make))
    modules["last"] = layers.normed_layer((plans[-1].width, last[0]), activation=style.stem)
    modules["pool"] = SpatialMean()
    if len(last) > 1:
        modules["hidden"] = nn.Linear(last[0], last[1])
        modules["activation"] = style.stem()
    modules["head"] = nn.Linear(last[-1], config.class_count)
    names = {("last", 1): ("last0",), **({("hidden", 1): ("last1",)} if len(last) > 1 else {})}
    return SectionedNetwork(modules, plans, after=Markers(axes=names))


def _build_separable(
    layers: Layers,
    plan: BlockPlan,
    inner: int,
    activation: MakeActivation,
    squeeze: tuple[MakeActivation, MakeActivation],
) -> "OrderedDict[str, nn.Module]":
    """A widening 1x1 convolution, a depthwise convolution, squeeze-and-excitation, and a narrowing 1x1 convolution."""
    modules = OrderedDict[str, nn.Module]()
    if inner != plan.width_in:
        modules["widen"] = layers.normed_layer((plan.width_in, inner), activation=activation)
    modules["depthwise"] = layers.normed_layer(
        (inner, inner), plan.side, stride=plan.stride, groups=inner, activation=activation
    )
    if plan.squeezed:
        modules["squeeze"] = SqueezeExcitation(inner, plan.squeezed, *squeeze)
    modules["narrow"] = layers.normed_layer((inner, plan.width))
    return modules


def _build_fused(
    layers: Layers, plan: BlockPlan, inner: int, activation: MakeActivation
) -> "OrderedDict[str, nn.Module]":
    """A convolution that widens and filters, and one that narrows; a single one if the width does not change."""
    filtering = partial(layers.normed_layer, kernel=plan.side, stride=plan.stride, activation=activation)
    if inner == plan.width_in:
        return OrderedDict(filter=filtering((plan.width_in, plan.width)))
    return OrderedDict(widen=filtering((plan.width_in, inner)), narrow=layers.normed_layer((inner, plan.width)))
