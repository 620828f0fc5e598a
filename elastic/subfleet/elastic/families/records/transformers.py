"""Settings of transformers of image patches and of symbols."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import (
    Counts,
    MaybeCounts,
    check_image,
    check_settings,
    check_symbols,
)
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn


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

    Attributes:
        input_shape: (channels, height, width); `patch` must divide height and width.
        class_count: as in `Family`.
        widths: width of the stream for each section; the same for all.
        depths: as in `Family`.
        heads: number of attention heads for each section or each block.
        patch: side of the patches that become tokens, at least 1.
        norm: "layer".
        hidden_widths: feed-forward width for each section or each block; empty means 4 times the stream's.
        head_width: width of each head's queries, keys and values; 0 means width / heads.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "vit"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    heads: Counts
    patch: Positive
    norm: Literal["layer"] = "layer"
    hidden_widths: MaybeCounts = ()
    head_width: Count = 0
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.transformer import vit

        return vit(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Bert:
    """A bidirectional transformer that predicts masked symbols of its input (Devlin et al. 2019).

    Attributes:
        input_shape: (tokens,).
        class_count: as in `Family`; for logits of each token, the number of symbols.
        widths: width of the stream for each section; the same for all.
        depths: as in `Family`.
        heads: number of attention heads for each section or each block.
        vocabulary: number of input symbols, at least 1.
        norm: "layer".
        hidden_widths: feed-forward width for each section or each block; empty means 4 times the stream's.
        head_width: width of each head's queries, keys and values; 0 means width / heads.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "bert"
    PREDICTS: ClassVar[Places] = "token"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    heads: Counts
    vocabulary: Positive
    norm: Literal["layer"] = "layer"
    hidden_widths: MaybeCounts = ()
    head_width: Count = 0
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.transformer import bert

        return bert(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class BertClassifier:
    """A bidirectional transformer like `Bert` that classifies sequences.

    Attributes:
        input_shape: (tokens,).
        class_count: as in `Family`.
        widths: as in `Bert`.
        depths: as in `Family`.
        heads: as in `Bert`.
        vocabulary: as in `Bert`.
        norm: "layer".
        hidden_widths: as in `Bert`.
        head_width: as in `Bert`.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "bert_classifier"
    PREDICTS: ClassVar[Places] = "sample"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    heads: Counts
    vocabulary: Positive
    norm: Literal["layer"] = "layer"
    hidden_widths: MaybeCounts = ()
    head_width: Count = 0
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.transformer import bert_classifier

        return bert_classifier(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Decoder:
    """A causal transformer with logits of each next symbol (GPT-2, Radford et al. 2019, section 2.3).

    Attributes:
        input_shape: (tokens,).
        class_count: as in `Bert`.
        widths: as in `Bert`.
        depths: as in `Family`.
        heads: as in `Bert`.
        vocabulary: as in `Bert`.
        norm: "layer".
        hidden_widths: as in `Bert`.
        head_width: as in `Bert`.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "decoder"
    PREDICTS: ClassVar[Places] = "token"
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    heads: Counts
    vocabulary: Positive
    norm: Literal["layer"] = "layer"
    hidden_widths: MaybeCounts = ()
    head_width: Count = 0
    learnable_steps: bool = False
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.transformer import decoder

        return decoder(self)
