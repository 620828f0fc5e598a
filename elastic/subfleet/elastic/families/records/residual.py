"""Settings of residual networks that normalise first: of linear layers for vectors, and of convolutions for images."""

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
@checked(check_settings)
class Mlp:
    """A residual network of linear layers; inputs of any shape are flattened.

    Attributes:
        input_shape: as in `Family`.
        class_count: as in `Family`.
        widths: of each section.
        depths: as in `Family`.
        group_size: numbers of one normalisation group, of which widths are multiples where norm is "group". Groups are
            never split between submodels, so a submodel normalises its numbers exactly as the full network does.
        norm: "group"; "batch" with running statistics that travel with the weights; or "none".
        hidden_widths: of each section, or of each block, the width inside a block; empty takes the section's width.
        stem_width: of the first layer where it differs from what the first section has; 0 takes that.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
        block_numbers: of each section the numbers in its blocks' names, in the order in which they follow each other;
            empty counts them from 0. Blocks that are inserted later have numbers of their own
            (`subfleet.elastic.growing`), so that all others keep their names. A section's first block is its number 0.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.preact import mlp

        return mlp(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class PreactResNet:
    """A residual network whose blocks normalise first (He et al. 2016, "Identity mappings", section 4.1).

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`.
        group_size: as in `Mlp`, of channels.
        norm: as in `Mlp`.
        block: "basic" or "bottleneck" (He et al. 2016, figure 5).
        hidden_widths: as in `Mlp`; empty takes the section's width, or a quarter of it in bottlenecks.
        kernels: of each section, the side of its kernels, which are then cut as well; empty takes 3.
        strides: of each section, the step of its first block; empty takes 1, and 2 after the first section.
        stem_width: as in `Mlp`.
        stem_stride: step of the first convolution.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
        block_numbers: as in `Mlp`.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.preact import preact_resnet

        return preact_resnet(self)
