"""Settings of pre-activation residual networks, of linear layers for vectors and of convolutions for images."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings)
class Mlp:
    """A residual network of linear layers; inputs of any shape are flattened.

    Blocks are usually as wide inside as their section.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "mlp"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    hidden_widths: fields.HiddenWidths = ()
    stem_width: fields.StemWidth = 0
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.residual:mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image)
class PreactResNet:
    """A pre-activation residual network (He et al. 2016, "Identity mappings", section 4.1).

    Blocks are those of He et al. 2016, figure 5; they are usually as wide inside as their section, and bottlenecks a
    quarter of that.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "preact_resnet"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    block: Literal["basic", "bottleneck"] = "basic"
    hidden_widths: fields.HiddenWidths = ()
    kernels: fields.Kernels = ()
    strides: fields.Strides = ()
    stem_width: fields.StemWidth = 0
    stem_stride: Positive = 1
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.residual:preact_resnet")
