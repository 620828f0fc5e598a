"""Settings of networks of inverted residual blocks: MobileNetV2, MobileNetV3 and EfficientNetV2."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import Condition, Length, checked
from subfleet.protocol.limits import Count, Positive

_SqueezedWidths = tuple[Count, ...]
"""Width inside squeeze-and-excitation for each section or each block; 0 for none, empty for none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class MobileNetV2:
    """MobileNetV2 (Sandler et al. 2018, section 4) without dropout.

    Blocks are usually 6 times as wide inside as their input, and the layer before the head 4 times as wide as the last
    section.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mobilenet_v2"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    hidden_widths: fields.HiddenWidths = ()
    kernels: fields.Kernels = ()
    strides: fields.Strides = ()
    stem_width: fields.StemWidth = 0
    stem_stride: Positive = 1
    last_widths: Annotated[fields.LastWidths, Length(most=1)] = ()
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.inverted:mobilenet_v2")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class MobileNetV3:
    """MobileNetV3 (Howard et al. 2019, section 5) without dropout; its small and large forms only differ in sizes.

    Blocks are usually 6 times as wide inside as their input, and the two layers before the head 6 and 8 times as wide
    as the last section.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mobilenet_v3"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    hidden_widths: fields.HiddenWidths = ()
    squeezed_widths: _SqueezedWidths = ()
    kernels: fields.Kernels = ()
    strides: fields.Strides = ()
    stem_width: fields.StemWidth = 0
    stem_stride: Positive = 1
    last_widths: Annotated[
        fields.LastWidths, Condition(accepts=lambda widths: len(widths) in (0, 2), words="empty or two numbers")
    ] = ()
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.inverted:mobilenet_v3")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class EfficientNetV2:
    """EfficientNetV2 (Tan and Le 2021, section 3.3) with SiLU, without dropout and stochastic depth.

    Blocks are usually 4 times as wide inside as their input, and the layer before the head 5 times as wide as the last
    section.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "efficientnet_v2"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    hidden_widths: fields.HiddenWidths = ()
    squeezed_widths: _SqueezedWidths = ()
    kernels: fields.Kernels = ()
    strides: fields.Strides = ()
    stem_width: fields.StemWidth = 0
    stem_stride: Positive = 1
    last_widths: Annotated[fields.LastWidths, Length(most=1)] = ()
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.inverted:efficientnet_v2")
