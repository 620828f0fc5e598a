"""Settings of LSTMs over symbols."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn


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

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.recurrent import lstm

        return lstm(self)
