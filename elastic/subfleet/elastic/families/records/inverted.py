"""Settings of networks of inverted residual blocks: MobileNetV2, MobileNetV3 and EfficientNetV2."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, MaybeCounts, check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import Condition, Length, checked
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class MobileNetV2:
    """MobileNetV2 (Sandler et al. 2018, section 4) without dropout.

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: channels of one normalisation group; widths must be multiples of it if norm is "group". Groups are
            never split between submodels, so a submodel normalises its channels exactly like the full network.
        norm: "group"; "batch" with running statistics that are sent with the weights; or "none".
        hidden_widths: expanded width inside for each section or each block; empty means 6 times a block's input.
        kernels: side of the filters of each section, which submodels may then cut as well; empty means 3.
        strides: stride of the first block of each section; empty means 1, and 2 after the first section.
        stem_width: channels of the first layer; 0 means those of the first section.
        stem_stride: stride of the first convolution.
        last_widths: width of the layer between the last section and the head; empty means 4 times the last section's.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mobilenet_v2"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    hidden_widths: MaybeCounts = ()
    kernels: MaybeCounts = ()
    strides: MaybeCounts = ()
    stem_width: Count = 0
    stem_stride: Positive = 1
    last_widths: Annotated[MaybeCounts, Length(most=1)] = ()
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.inverted import mobilenet_v2

        return mobilenet_v2(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class MobileNetV3:
    """MobileNetV3 (Howard et al. 2019, section 5) without dropout; its small and large forms only differ in sizes.

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `MobileNetV2`.
        norm: as in `MobileNetV2`.
        hidden_widths: as in `MobileNetV2`; empty means 6 times a block's input.
        squeezed_widths: width inside squeeze-and-excitation for each section or each block; 0 for none, empty for none
            at all.
        kernels: as in `MobileNetV2`.
        strides: as in `MobileNetV2`.
        stem_width: as in `MobileNetV2`.
        stem_stride: as in `MobileNetV2`.
        last_widths: widths of both layers between the last section and the head; empty means 6 and 8 times the last
            section's.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mobilenet_v3"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    hidden_widths: MaybeCounts = ()
    squeezed_widths: tuple[Count, ...] = ()
    kernels: MaybeCounts = ()
    strides: MaybeCounts = ()
    stem_width: Count = 0
    stem_stride: Positive = 1
    last_widths: Annotated[
        MaybeCounts, Condition(accepts=lambda widths: len(widths) in (0, 2), words="empty or two numbers")
    ] = ()
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.inverted import mobilenet_v3

        return mobilenet_v3(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class EfficientNetV2:
    """EfficientNetV2 (Tan and Le 2021, section 3.3) with SiLU, without dropout and stochastic depth.

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `MobileNetV2`.
        norm: as in `MobileNetV2`.
        hidden_widths: as in `MobileNetV2`; empty means 4 times a block's input.
        squeezed_widths: width inside squeeze-and-excitation for each section or each block; 0 for none, empty for none
            at all.
        kernels: as in `MobileNetV2`.
        strides: as in `MobileNetV2`.
        stem_width: as in `MobileNetV2`.
        stem_stride: as in `MobileNetV2`.
        last_widths: as in `MobileNetV2`; empty means 5 times the last section's width.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "efficientnet_v2"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    hidden_widths: MaybeCounts = ()
    squeezed_widths: tuple[Count, ...] = ()
    kernels: MaybeCounts = ()
    strides: MaybeCounts = ()
    stem_width: Count = 0
    stem_stride: Positive = 1
    last_widths: Annotated[MaybeCounts, Length(most=1)] = ()
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.inverted import efficientnet_v2

        return efficientnet_v2(self)
