"""Networks without residual connections: VGG for images, fully convolutional networks, and keyword spotting.

A submodel may omit layers, so all layers of a section except the first have as many output as input channels. If layers
have widths of their own, a submodel without a layer keeps the same channels of its input and output axes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.layers import ChannelsLast, Layers, SpatialMean
from subfleet.elastic.families.records.plain import DsCnn, Fcn, Vgg
from subfleet.elastic.families.sections import (
    BlockPlan,
    build_sections,
    class_axis,
    kernel_axes,
    kernel_of,
    plan_blocks,
    skippable_layers,
    stream_axes,
    with_layer_widths,
)
from subfleet.elastic.network import Identity


def vgg(config: Vgg) -> Blueprint:
    """Sections of 3x3 convolutions, each followed by 2x2 max pooling (Simonyan and Zisserman 2015, section 2.1).

    It ends with one linear layer instead of the paper's three, as usual for small images.

    Raises:
        ConfigError: a kernel side is even.
    """
    return _blueprint(config, _build_vgg)


def fcn(config: Fcn) -> Blueprint:
    """Sections of 3x3 convolutions at full resolution, and a linear layer of each pixel (Long et al. 2015, section 3).

    Raises:
        ConfigError: a kernel side is even.
    """
    return _blueprint(config, _build_fcn)


def ds_cnn(config: DsCnn) -> Blueprint:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5).

    Inputs are (1, frames, coefficients), such as 49 frames of 10 MFCC for one second of speech.

    Raises:
        ConfigError: a kernel side is even.
    """
    stem_width = config.stem_width or config.widths[0]
    return _blueprint(config, _build_ds_cnn, stem_width=stem_width, layers=("depthwise.", "pointwise."))


def _blueprint(
    config: Any, build: Callable[..., nn.Module], *, stem_width: int = 0, layers: Iterable[str] = ("",)
) -> Blueprint:
    """A network of blocks that submodels may omit.

    Args:
        config: the settings.
        build: builds its module from settings, blocks and sizes.
        stem_width: channels before the first block; 0 if it reads the image, which is never cut.
        layers: prefixes of the layers of a block.
    """
    plans = _plan_blocks(config, stem_width or config.input_shape[0])
    return Blueprint(
        axes=(*stream_axes(config, plans, stem=stem_width > 0), *kernel_axes(plans), class_axis(config)),
        blocks=skippable_layers(plans),
        group_size=config.group_size,
        build=partial(build, config, plans),
        identities=_list_identities(config, plans, layers),
    )


def _plan_blocks(config: Vgg | Fcn | DsCnn, stem_width: int) -> tuple[BlockPlan, ...]:
    ones = (1,) * len(config.widths)
    plans = plan_blocks(config, strides=ones, stem_width=stem_width, keeping="none", kernels=config.kernels)
    return with_layer_widths(plans, config.layer_widths) if config.layer_widths else plans


def _list_identities(
    config: Vgg | Fcn | DsCnn, plans: Iterable[BlockPlan], layers: Iterable[str]
) -> dict[str, Identity]:
    """The layers that can pass on their input, which is never below 0; group norms cannot."""
    norm = "norm.norm" if config.scaler else "norm"
    kinds = {"batch": ("conv", norm), "none": ("conv",), "group": ()}[config.norm]
    inserted = [plan.name for plan in plans if plan.position]
    return {f"{name}.{layer}{kind}.weight": "passing" for name in inserted for layer in layers for kind in kinds}


def _layer_of(config: Vgg | Fcn, plans: tuple[BlockPlan, ...], sizes: Sizes) -> Callable[[BlockPlan], nn.Module]:
    """The function that creates a block's convolution with its norm and activation."""
    layers = Layers(config=config)

    def block(plan: BlockPlan) -> nn.Module:
        width_in = sizes[plan.stream_in] if plan is not plans[0] else config.input_shape[0]
        return layers.normed_layer((width_in, sizes[plan.stream]), kernel_of(plan, sizes), activation=nn.ReLU)

    return block


def _build_fcn(config: Fcn, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    modules = OrderedDict[str, nn.Module](build_sections(plans, sizes, _layer_of(config, plans, sizes)))
    modules.update(pixels=ChannelsLast(), head=nn.Linear(sizes[plans[-1].stream], sizes["class"]))
    return nn.Sequential(modules)


def _build_vgg(config: Vgg, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    block = _layer_of(config, plans, sizes)
    modules = OrderedDict[str, nn.Module](build_sections(plans, sizes, block, close=partial(nn.MaxPool2d, 2)))
    modules.update(pool=SpatialMean(), head=nn.Linear(sizes[plans[-1].stream], sizes["class"]))
    return nn.Sequential(modules)


def _build_ds_cnn(config: DsCnn, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    layers = Layers(config=config)

    def block(plan: BlockPlan) -> nn.Module:
        width_in, kernel = sizes[plan.stream_in], kernel_of(plan, sizes)
        depthwise = layers.normed_layer((width_in, width_in), kernel, groups=width_in, activation=nn.ReLU)
        pointwise = layers.normed_layer((width_in, sizes[plan.stream]), activation=nn.ReLU)
        return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))

    stem_width = sizes[plans[0].stream_in]
    # Padding of 5 rows and 1 column gives 25 x 5 positions for 49 x 10, like "same" padding at stride 2.
    conv = nn.Conv2d(config.input_shape[0], stem_width, (10, 4), stride=2, padding=(5, 1), bias=config.norm == "none")
    stem = OrderedDict[str, nn.Module](conv=conv, norm=layers.norm(stem_width), activation=nn.ReLU())
    modules = OrderedDict[str, nn.Module](stem=nn.Sequential(stem))
    modules.update(build_sections(plans, sizes, block))
    modules.update(pool=SpatialMean(), head=nn.Linear(sizes[plans[-1].stream], sizes["class"]))
    return nn.Sequential(modules)
