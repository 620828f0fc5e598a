"""Settings of LSTMs over symbols."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols)
class Lstm:
    """An LSTM with logits of each next symbol (Hochreiter and Schmidhuber 1997); a block is a layer."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "lstm"
    PREDICTS: ClassVar[Places] = "token"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    vocabulary: fields.Vocabulary
    norm: Literal["none"] = "none"
    embedding_width: fields.EmbeddingWidth = 0
    module = fields.built_by("subfleet.elastic.families.recurrent:lstm")
