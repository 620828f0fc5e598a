"""Settings of LSTMs over symbols."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import BlockNumbers, Counts, check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols)
class Lstm:
    """An LSTM with logits of each next symbol (Hochreiter and Schmidhuber 1997).

    Attributes:
        input_shape: (tokens,).
        class_count: number of predicted symbols, at least 2.
        widths: width of the states of each section's layers.
        depths: as in `Family`; a block is a layer.
        vocabulary: number of input symbols, at least 1.
        norm: "none".
        embedding_width: width of the embedding; 0 means that of the first section.
        block_numbers: for each section, the numbers in its blocks' names, in network order; empty counts from 0. Blocks
            that are inserted later get new numbers (`subfleet.elastic.growing`), so that all others keep their names.
            The first block of a section has number 0.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "lstm"
    PREDICTS: ClassVar[Places] = "token"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    vocabulary: Positive
    norm: Literal["none"] = "none"
    embedding_width: Count = 0
    block_numbers: BlockNumbers = field(default=(), metadata=ADDED_LATER)

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.recurrent import lstm

        return lstm(self)
