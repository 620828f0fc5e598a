"""Settings of networks without residual connections: VGG, fully convolutional networks, and keyword spotting."""

from dataclasses import dataclass, field
from typing import ClassVar

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive
from subfleet.protocol.schema import ADDED_LATER


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Vgg:
    """Sections of convolutions, each followed by 2x2 max pooling (Simonyan and Zisserman 2015, section 2.1)."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "vgg"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    kernels: fields.Kernels = ()
    scaler: bool = False
    layer_widths: fields.LayerWidths = field(default=(), metadata=ADDED_LATER)
    module = fields.built_by("subfleet.elastic.families.plain:vgg")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class DsCnn:
    """A convolution over time and frequency, then depthwise separable ones (Zhang et al. 2017, section 3.5).

    Inputs are (1, frames, coefficients), such as 49 frames of 10 MFCC for one second of speech. Layer widths are those
    of blocks; inside, each block has the width of its input.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "ds_cnn"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    kernels: fields.Kernels = ()
    stem_width: fields.StemWidth = 0
    scaler: bool = False
    layer_widths: fields.LayerWidths = field(default=(), metadata=ADDED_LATER)
    module = fields.built_by("subfleet.elastic.families.plain:ds_cnn")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class Fcn:
    """Sections of convolutions that keep height and width, with classes of each pixel (Long et al. 2015, section 3).

    There is no pooling and therefore no upsampling: for small images with a label for every pixel.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "fcn"
    PREDICTS: ClassVar[Places] = "pixel"
    learnable_steps: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    kernels: fields.Kernels = ()
    scaler: bool = False
    layer_widths: fields.LayerWidths = field(default=(), metadata=ADDED_LATER)
    module = fields.built_by("subfleet.elastic.families.plain:fcn")
