"""Settings of transformers of image patches and of symbols."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import (
    BlockNumbers,
    Counts,
    MaybeCounts,
    check_image,
    check_settings,
    check_symbols,
)
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint


def _check_patch(input_shape: tuple[int, ...], patch: int) -> Iterator[str]:
    if any(side % patch for side in input_shape[1:]):
        yield f"patch is {patch}, but must divide height and width of input_shape {input_shape}"


def _check_stream(widths: tuple[int, ...], heads: tuple[int, ...], head_width: int) -> Iterator[str]:
    width = widths[0]
    if set(widths) != {width}:
        yield f"widths are {widths}, but all sections share one stream; give them one width"
    elif not head_width and any(width % count for count in heads):
        yield f"heads is {heads}, but must divide width {width}, where head_width is not set"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_patch, _check_stream)
class Vit:
    """ViT (Dosovitskiy et al. 2021, section 3.1).

    Attributes:
        input_shape: (channels, height, width), of which `patch` divides the last two.
        class_count: as in `Family`.
        widths: of each section, the width of the stream that all share.
        depths: as in `Family`.
        heads: of each section, or of each block, the heads of its attention.
        patch: side of the patches that become tokens, 1 or more.
        norm: "layer".
        hidden_widths: of each section, or of each block, the feed-forward width; empty takes 4 times the stream's.
        head_width: of each head's queries, keys and values; 0 takes width / heads.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
        block_numbers: of each section the numbers in its blocks' names, in the order in which they follow each other;
            empty counts them from 0. Blocks that are inserted later have numbers of their own
            (`subfleet.elastic.growing`), so that all others keep their names. A section's first block is its number 0.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.transformer import vit

        return vit(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Bert:
    """A transformer whose tokens see all others, which tells the symbols that its input hides (Devlin et al. 2019).

    Attributes:
        input_shape: (tokens,).
        class_count: as in `Family`; where logits are of each token, so many symbols.
        widths: of each section, the width of the stream that all share.
        depths: as in `Family`.
        heads: of each section, or of each block, the heads of its attention.
        vocabulary: how many symbols there are, 1 or more.
        norm: "layer".
        hidden_widths: of each section, or of each block, the feed-forward width; empty takes 4 times the stream's.
        head_width: of each head's queries, keys and values; 0 takes width / heads.
        learnable_steps: as in `Family`.
        scaler: as in `Family`.
        block_numbers: of each section the numbers in its blocks' names, in the order in which they follow each other;
            empty counts them from 0. Blocks that are inserted later have numbers of their own
            (`subfleet.elastic.growing`), so that all others keep their names. A section's first block is its number 0.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.transformer import bert

        return bert(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class BertClassifier:
    """The same, which gives logits of a sequence.

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
        block_numbers: as in `Bert`.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.transformer import bert_classifier

        return bert_classifier(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_stream)
class Decoder:
    """A causal transformer that gives logits of each next symbol (GPT-2, Radford et al. 2019, section 2.3).

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
        block_numbers: as in `Bert`.
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
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.transformer import decoder

        return decoder(self)
