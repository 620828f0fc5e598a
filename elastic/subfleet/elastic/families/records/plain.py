"""Settings of networks without residual connections: VGG, fully convolutional ones, and those that hear keywords."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import BlockNumbers, Counts, MaybeCounts, check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Vgg:
    """Sections of convolutions, each closed by 2x2 max pooling (Simonyan and Zisserman 2015, section 2.1).

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: channels of one normalisation group, of which widths are multiples where norm is "group". Groups
            are never split between submodels, so a submodel normalises its channels exactly as the full network does.
        norm: "group"; "batch" with running statistics that travel with the weights; or "none".
        kernels: of each section, the side of its kernels, which are then cut as well; empty takes 3.
        scaler: as in `Family`.
        block_numbers: of each section the numbers in its blocks' names, in the order in which they follow each other;
            empty counts them from 0. Blocks that are inserted later have numbers of their own
            (`subfleet.elastic.growing`), so that all others keep their names. A section's first block is its number 0.
        layer_widths: channels that each layer gives, in network order, the last of a section its section's width; empty
            gives every layer that of its section. Where they are told, layers share no axis of channels: each is cut
            and widened by itself, and a submodel leaves out a layer only where what it gives is cut as what it reads.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
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
        stem_width: channels of the first layer where it differs from what the first section has; 0 takes that.
        scaler: as in `Family`.
        block_numbers: as in `Vgg`.
        layer_widths: as in `Vgg`, of blocks: inside, each keeps the width that it reads.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.plain import ds_cnn

        return ds_cnn(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Fcn:
    """Sections of convolutions that keep height and width, with classes of each pixel (Long et al. 2015, section 3).

    Nothing is pooled, so that nothing has to be upsampled either: for small images, of which every pixel is labelled.

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`, of each pixel.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `Vgg`.
        norm: as in `Vgg`.
        kernels: as in `Vgg`.
        scaler: as in `Family`.
        block_numbers: as in `Vgg`.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)
    layer_widths: MaybeCounts = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.plain import fcn

        return fcn(self)
