"""Settings of pre-activation residual networks, of linear layers for vectors and of convolutions for images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, MaybeCounts, check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings)
class Mlp:
    """A residual network of linear layers; inputs of any shape are flattened.

    Attributes:
        input_shape: as in `Family`.
        class_count: as in `Family`.
        widths: width of each section.
        depths: as in `Family`.
        group_size: values of one normalisation group; widths must be multiples of it if norm is "group". Groups are
            never split between submodels, so a submodel normalises its values exactly like the full network.
        norm: "group"; "batch" with running statistics that are sent with the weights; or "none".
        hidden_widths: width inside the blocks for each section or each block; empty means the section's width.
        stem_width: width of the first layer; 0 means that of the first section.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mlp"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    hidden_widths: MaybeCounts = ()
    stem_width: Count = 0
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.residual import mlp

        return mlp(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class PreactResNet:
    """A pre-activation residual network (He et al. 2016, "Identity mappings", section 4.1).

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `Mlp`, for channels.
        norm: as in `Mlp`.
        block: "basic" or "bottleneck" (He et al. 2016, figure 5).
        hidden_widths: as in `Mlp`; empty means the section's width, or a quarter of it in bottlenecks.
        kernels: side of the kernels of each section, which submodels may then cut as well; empty means 3.
        strides: stride of the first block of each section; empty means 1, and 2 after the first section.
        stem_width: as in `Mlp`.
        stem_stride: stride of the first convolution.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "preact_resnet"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    block: Literal["basic", "bottleneck"] = "basic"
    hidden_widths: MaybeCounts = ()
    kernels: MaybeCounts = ()
    strides: MaybeCounts = ()
    stem_width: Count = 0
    stem_stride: Positive = 1
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.residual import preact_resnet

        return preact_resnet(self)
