"""Networks without residual connections: VGG for images, fully convolutional networks, and keyword spotting.

A submodel may omit layers, so all layers of a section except the first have as many output as input channels. If layers
have widths of their own, a submodel without a layer keeps the same channels of its input and output axes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.layers import ChannelsLast, Layers, SpatialMean
from subfleet.elastic.families.records.plain import DsCnn, Fcn, Vgg
from subfleet.elastic.families.sections import (
    BlockPlace,
    block_places,
    build_sections,
    class_axis,
    kernel_axes,
    kernel_of,
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
    places = _places(config, config.input_shape[0])
    return Blueprint(
        # The first section's input is the image, which is never cut.
        axes=(*stream_axes(config, places, stem=False), *kernel_axes(places), class_axis(config)),
        blocks=skippable_layers(places),
        group_size=config.group_size,
        build=partial(_build_vgg, config, places),
        identities=_list_identities(config, places, ("",)),
    )


def fcn(config: Fcn) -> Blueprint:
    """Sections of 3x3 convolutions at full resolution, and a linear layer of each pixel (Long et al. 2015, section 3).

    Raises:
        ConfigError: a kernel side is even.
    """
    places = _places(config, config.input_shape[0])
    return Blueprint(
        axes=(*stream_axes(config, places, stem=False), *kernel_axes(places), class_axis(config)),
        blocks=skippable_layers(places),
        group_size=config.group_size,
        build=partial(_build_fcn, config, places),
        identities=_list_identities(config, places, ("",)),
    )


def ds_cnn(config: DsCnn) -> Blueprint:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5).

    Inputs are (1, frames, coefficients), such as 49 frames of 10 MFCC for one second of speech.

    Raises:
        ConfigError: a kernel side is even.
    """
    stem_width = config.stem_width or config.widths[0]
    places = _places(config, stem_width)
    return Blueprint(
        axes=(*stream_axes(config, places), *kernel_axes(places), class_axis(config)),
        blocks=skippable_layers(places),
        group_size=config.group_size,
        build=partial(_build_ds_cnn, config, places),
        identities=_list_identities(config, places, ("depthwise.", "pointwise.")),
    )


def _places(config: Vgg | Fcn | DsCnn, stem_width: int) -> tuple[BlockPlace, ...]:
    ones = (1,) * len(config.widths)
    places = block_places(config, strides=ones, stem_width=stem_width, keeping="none", kernels=config.kernels)
    return with_layer_widths(places, config.layer_widths) if config.layer_widths else places


def _list_identities(
    config: Vgg | Fcn | DsCnn, places: Iterable[BlockPlace], layers: Iterable[str]
) -> dict[str, Identity]:
    """The layers that can pass on their input, which is never below 0; group norms cannot."""
    norm = "norm.norm" if config.scaler else "norm"
    kinds = {"batch": ("conv", norm), "none": ("conv",), "group": ()}[config.norm]
    inserted = [place.name for place in places if place.position]
    return {f"{name}.{layer}{kind}.weight": "passing" for name in inserted for layer in layers for kind in kinds}


def _layer_of(config: Vgg | Fcn, places: tuple[BlockPlace, ...], sizes: Sizes) -> Callable[[BlockPlace], nn.Module]:
    """The function that creates a block's convolution with its norm and activation."""
    layers = Layers(config=config)

    def block(place: BlockPlace) -> nn.Module:
        width_in = sizes[place.stream_in] if place is not places[0] else config.input_shape[0]
        return layers.normed_layer((width_in, sizes[place.stream]), kernel_of(place, sizes), activation=nn.ReLU)

    return block


def _build_fcn(config: Fcn, places: tuple[BlockPlace, ...], sizes: Sizes) -> nn.Module:
    modules = OrderedDict[str, nn.Module](build_sections(places, sizes, _layer_of(config, places, sizes)))
    modules.update(pixels=ChannelsLast(), head=nn.Linear(sizes[places[-1].stream], sizes["class"]))
    return nn.Sequential(modules)


def _build_vgg(config: Vgg, places: tuple[BlockPlace, ...], sizes: Sizes) -> nn.Module:
    block = _layer_of(config, places, sizes)
    modules = OrderedDict[str, nn.Module](build_sections(places, sizes, block, close=partial(nn.MaxPool2d, 2)))
    modules.update(pool=SpatialMean(), head=nn.Linear(sizes[places[-1].stream], sizes["class"]))
    return nn.Sequential(modules)


def _build_ds_cnn(config: DsCnn, places: tuple[BlockPlace, ...], sizes: Sizes) -> nn.Module:
    layers = Layers(config=config)

    def block(place: BlockPlace) -> nn.Module:
        width_in, kernel = sizes[place.stream_in], kernel_of(place, sizes)
        depthwise = layers.normed_layer((width_in, width_in), kernel, groups=width_in, activation=nn.ReLU)
        pointwise = layers.normed_layer((width_in, sizes[place.stream]), activation=nn.ReLU)
        return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))

    stem_width = sizes[places[0].stream_in]
    # Padding of 5 rows and 1 column gives 25 x 5 positions for 49 x 10, like "same" padding at stride 2.
    conv = nn.Conv2d(config.input_shape[0], stem_width, (10, 4), stride=2, padding=(5, 1), bias=config.norm == "none")
    stem = OrderedDict[str, nn.Module](conv=conv, norm=layers.norm(stem_width), activation=nn.ReLU())
    modules = OrderedDict[str, nn.Module](stem=nn.Sequential(stem))
    modules.update(build_sections(places, sizes, block))
    modules.update(pool=SpatialMean(), head=nn.Linear(sizes[places[-1].stream], sizes["class"]))
    return nn.Sequential(modules)
