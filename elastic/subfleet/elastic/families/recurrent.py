"""LSTMs over symbols; the states of a section's layers share one axis, so layers after the first can be omitted."""

from collections import OrderedDict

from torch import Tensor, nn

from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.sections import SectionedNetwork, build_sections, plan_blocks
from subfleet.elastic.recording.markers import Markers


def lstm(config: Lstm) -> nn.Module:
    """The network of `Lstm`, for indices (batch, tokens)."""
    plans = plan_blocks(config, width_in=config.embedding_width, stream="state")
    modules = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, plans[0].width_in))
    modules.update(build_sections(plans, lambda plan: RecurrentLayer(plan.width_in, plan.width)))
    modules["head"] = nn.Linear(plans[-1].width, config.class_count)
    before = Markers(
        axes={("head.weight", 0): ("class",), ("embedding.weight", 1): ("embedding",)},
        kinds={"embedding": "embed"},
        roles={"embedding.weight": "symbol"},
    )
    return SectionedNetwork(modules, plans, channel=2, before=before)


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
