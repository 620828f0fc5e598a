"""Settings of networks without residual connections: VGG, fully convolutional networks, and keyword spotting."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, MaybeCounts, check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Vgg:
    """Sections of convolutions, each followed by 2x2 max pooling (Simonyan and Zisserman 2015, section 2.1).

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: channels of one normalisation group; widths must be multiples of it if norm is "group". Groups are
            never split between submodels, so a submodel normalises its channels exactly like the full network.
        norm: "group"; "batch" with running statistics that are sent with the weights; or "none".
        kernels: side of the kernels of each section, which submodels may then cut as well; empty means 3.
        scaler: as in `Family`.
        layer_widths: output channels of each layer, in network order, with the section's width for the last layer of a
            section; empty gives every layer the width of its section. If given, layers share no channel axis: each is
            cut and widened by itself, and a submodel can only omit a layer if its input and output are cut alike.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "vgg"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    kernels: MaybeCounts = ()
    scaler: bool = False
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.plain import vgg

        return vgg(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class DsCnn:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5).

    Attributes:
        input_shape: (1, frames, coefficients), such as 49 frames of 10 MFCC for one second of speech.
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `Vgg`.
        norm: as in `Vgg`.
        kernels: as in `Vgg`.
        stem_width: channels of the first layer; 0 means those of the first section.
        scaler: as in `Family`.
        layer_widths: as in `Vgg`, for blocks; inside, each block has the width of its input.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "ds_cnn"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    kernels: MaybeCounts = ()
    stem_width: Count = 0
    scaler: bool = False
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.plain import ds_cnn

        return ds_cnn(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Fcn:
    """Sections of convolutions that keep height and width, with classes of each pixel (Long et al. 2015, section 3).

    There is no pooling and therefore no upsampling: for small images with a label for every pixel.

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`, for each pixel.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `Vgg`.
        norm: as in `Vgg`.
        kernels: as in `Vgg`.
        scaler: as in `Family`.
        layer_widths: as in `Vgg`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "fcn"
    PREDICTS: ClassVar[Places] = "pixel"
    learnable_steps: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    kernels: MaybeCounts = ()
    scaler: bool = False
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.plain import fcn

        return fcn(self)
