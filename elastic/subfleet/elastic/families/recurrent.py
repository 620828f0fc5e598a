"""LSTMs over symbols: layers of one section have states of one axis, so that those after its first can be left out."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes, check_used
from subfleet.elastic.families.sections import (
    BlockPlan,
    block_plans,
    check_symbols,
    class_axis,
    in_sections,
    skippable,
    stream_axes,
)
from subfleet.elastic.network import ModelConfig

__all__ = ["lstm"]

_EMBEDDING = "embedding"


def lstm(config: ModelConfig) -> Blueprint:
    """An LSTM that gives logits of each next symbol, for indices (batch, tokens).

    A section's layers have states of the section's width.

    Raises:
        ConfigError: the input is no sequence of symbols, or the configuration sets what the family has no use for.
    """
    check_used(config, ("vocabulary", "embedding_width"), ("none",))
    check_symbols(config)
    embedding_width = config.embedding_width or config.widths[0]
    plans = block_plans(
        config,
        strides=(1,) * len(config.widths),
        stem_width=embedding_width,
        keeping="none",
        stem=_EMBEDDING,
        stream="state",
    )
    return Blueprint(
        axes=(
            class_axis(config),
            Axis(name=_EMBEDDING, size=embedding_width, kind="embed"),
            *stream_axes(config, plans, stem=False),
        ),
        blocks=skippable(plans),
        build=partial(_build, config, plans),
        roles={"embedding.weight": "symbol"},
    )


def _build(config: ModelConfig, plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    def block(plan: BlockPlan) -> RecurrentLayer:
        return RecurrentLayer(sizes[plan.stream_in], sizes[plan.stream])

    modules = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, sizes[_EMBEDDING]))
    modules.update(in_sections(plans, sizes, block))
    modules["head"] = nn.Linear(sizes[plans[-1].stream], sizes["class"])
    return nn.Sequential(modules)


class RecurrentLayer(nn.Module):
    """One LSTM layer whose state starts at zero (Hochreiter and Schmidhuber 1997).

    Args:
        width_in: of its inputs.
        width: of its state.
    """

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width_in, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        outputs: Tensor = self.lstm(x)[0]
        return outputs
