"""LSTMs over symbols; the states of a section's layers share one axis, so layers after the first can be omitted."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.sections import (
    AxisNames,
    BlockPlan,
    build_sections,
    class_axis,
    plan_blocks,
    skippable,
)

_EMBEDDING = "embedding"


def lstm(config: Lstm) -> Blueprint:
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
    states = {plan.stream: plan.width for plan in plans}
    return Blueprint(
        axes=(
            class_axis(config),
            Axis(name=_EMBEDDING, size=embedding_width, kind="embed"),
            *(Axis(name=name, size=size, kind="channel") for name, size in states.items()),
        ),
        blocks=skippable(plans),
        build=partial(_build, config, plans),
        roles={"embedding.weight": "symbol"},
        symbols=config.vocabulary,
    )


def _build(config: Lstm, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    def block(plan: BlockPlan) -> RecurrentLayer:
        return RecurrentLayer(sizes[plan.stream_in], sizes[plan.stream])

    modules = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, sizes[_EMBEDDING]))
    modules.update(build_sections(plans, sizes, block))
    modules["head"] = nn.Linear(sizes[plans[-1].stream], sizes["class"])
    return nn.Sequential(modules)


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
