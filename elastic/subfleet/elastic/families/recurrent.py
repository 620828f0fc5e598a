"""LSTMs over symbols; the states of a section's layers share one axis, so layers after the first can be omitted."""

from collections import OrderedDict

from torch import Tensor, nn

from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.sections import (
    AxisNames,
    MarkedSequence,
    build_sections,
    list_sections,
    plan_blocks,
)
from subfleet.elastic.recording.markers import Markers

_EMBEDDING = "embedding"


def lstm(config: Lstm) -> nn.Module:
    """An LSTM with logits of each next symbol, for indices (batch, tokens).

    The states of a section's layers have the section's width.
    """
    embedding_width = config.embedding_width or config.widths[0]
    plans = plan_blocks(
        config,
        strides=(1,) * len(config.widths),
        stem_width=embedding_width,
        keeping="none",
        names=AxisNames(stem=_EMBEDDING, stream="state"),
    )
    modules = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, embedding_width))
    modules.update(build_sections(plans, lambda plan: RecurrentLayer(plan.width_in, plan.width)))
    modules["head"] = nn.Linear(plans[-1].width, config.class_count)
    markers = Markers(
        axes={
            ("head.weight", 0): ("class",),
            ("embedding.weight", 1): (_EMBEDDING,),
            **{(f"{plan.name}.lstm.weight_hh_l0", 1): (plan.stream,) for plan in plans},
        },
        kinds={_EMBEDDING: "embed"},
        sections=list_sections(plans),
        kept=frozenset(plan.name for plan in plans if not plan.position),
        roles={"embedding.weight": "symbol"},
        drawn=True,
    )
    return MarkedSequence(modules, markers)


class RecurrentLayer(nn.Module):
    """An LSTM layer with initial state 0 (Hochreiter and Schmidhuber 1997).

    Args:
        width_in: width of the input.
        width: width of the state.
    """

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width_in, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        outputs: Tensor = self.lstm(x)[0]
        return outputs
