"""Settings of transformers of image patches and of symbols."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive


def _check_patch(input_shape: tuple[int, ...], patch: int) -> Iterator[str]:
    if any(side % patch for side in input_shape[1:]):
        yield f"patch is {patch}, but must divide height and width of input_shape {input_shape}"


def _check_stream(widths: tuple[int, ...], heads: tuple[int, ...], head_width: int) -> Iterator[str]:
    width = widths[0]
    if set(widths) != {width}:
        yield f"widths are {widths}, but all sections share one stream; give them one width"
    elif not head_width and any(width % count for count in heads):
        yield f"heads is {heads}, but must divide width {width} unless head_width is set"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_patch, _check_stream)
class Vit:
    """ViT (Dosovitskiy et al. 2021, section 3.1).

    Tokens are square patches with a side of `patch`, which must divide height and width of the images. Feed-forward
    parts are usually 4 times as wide inside as the stream, in all transformers.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "vit"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    heads: fields.Heads
    patch: Positive
    norm: Literal["layer"] = "layer"
    hidden_widths: fields.HiddenWidths = ()
    head_width: fields.HeadWidth = 0
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.transformer:vit")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Bert:
    """A bidirectional transformer that predicts masked symbols of its input (Devlin et al. 2019)."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "bert"
    PREDICTS: ClassVar[Places] = "token"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    heads: fields.Heads
    vocabulary: fields.Vocabulary
    norm: Literal["layer"] = "layer"
    hidden_widths: fields.HiddenWidths = ()
    head_width: fields.HeadWidth = 0
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.transformer:bert")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class BertClassifier:
    """A bidirectional transformer like `Bert` that classifies sequences."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "bert_classifier"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    heads: fields.Heads
    vocabulary: fields.Vocabulary
    norm: Literal["layer"] = "layer"
    hidden_widths: fields.HiddenWidths = ()
    head_width: fields.HeadWidth = 0
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.transformer:bert_classifier")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Decoder:
    """A causal transformer with logits of each next symbol (GPT-2, Radford et al. 2019, section 2.3)."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "decoder"
    PREDICTS: ClassVar[Places] = "token"
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    heads: fields.Heads
    vocabulary: fields.Vocabulary
    norm: Literal["layer"] = "layer"
    hidden_widths: fields.HiddenWidths = ()
    head_width: fields.HeadWidth = 0
    learnable_steps: bool = False
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.transformer:decoder")
