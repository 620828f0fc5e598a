"""Power-of-choice: of some clients that are drawn, those with the largest losses take part.

Cho et al., "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022, section 4 (first as
"Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection Strategies", 2020).

Client half: train the given model with the given objective.
Server half: candidates are drawn without replacement, each with a probability in proportion to its samples; of these,
the clients with the largest losses train. A loss is the one that a client told when it was last aggregated, so that
nothing is asked besides (the paper's rpow-d); who was never aggregated comes before all others, the paper's infinite
loss. Both
are claims: samples count no more than three standard deviations above the median, and who has been chosen too often
comes last, whether it answered or not.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from subfleet.methods.aggregator import UNIFORM, Aggregator, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.roles import Memory, Roles
from subfleet.methods.selector import AvailableClient, Selection, SelectionContext, Selector, without_replacement
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model
from subfleet.methods.turns import Choice, had_their_share, most_believed, with_choice
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount

__all__ = ["ChoiceMemory", "PowerOfChoice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMemory:
    """What Power-of-choice remembers: the clients that the last rounds chose, whether these answered or not."""

    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PowerOfChoice:
    """Parameters of Power-of-choice.

    Attributes:
        candidates: d, how many are drawn for each client that takes part, 1 or more; the paper tries 2 to 10 times as
            many. With 1 it is a plain draw by samples.
        model: which models are trained.
        losses: "reported" goes by the loss that a client told with its last update, as the paper's rpow-d does;
            "evaluated" by that of the very model, on held-out data, as the paper's pow-d does on all data. The latter
            needs `[evaluation] every = 1`, and devices with held-out data.
        most_often: how many times as often as if all took turns a client is chosen at most, while there are others; 0
            is no limit.
        weighting: "uniform" as in the paper, whose draw has counted the samples; or "samples".
    """

    TYPE: ClassVar[str] = "power_of_choice"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Power-of-choice",
        paper="Cho et al., Towards Understanding Biased Client Selection in Federated Learning, AISTATS 2022",
        varies=(),
        published={
            "candidates": None,
            "model": ONE_MODEL,
            "losses": Published(
                value="of the model, on all data of a client",
                told={
                    "reported": "clients are selected by their last reported losses (the paper's rpow-d)",
                    "evaluated": "losses are computed on held-out data",
                },
            ),
            "most_often": Published(value=0.0, told="clients selected too often come last"),
            "weighting": UNIFORM,
        },
    )
    candidates: Annotated[float, Range(least=1)] = 2.0
    model: Homogeneous = "largest"
    losses: Literal["reported", "evaluated"] = "reported"
    most_often: Amount = 1.5
    weighting: Weighting = "uniform"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """FedAvg of those with the largest losses."""
        return Roles(
            selector=Selector(select=self._select, needs_evaluations=self.losses == "evaluated"),
            memory=Memory(initial=ChoiceMemory()),
            assigner=one_model(self.model),
            aggregator=Aggregator(weigh=weigh_by(self.weighting)),
        )

    def _select(self, context: SelectionContext) -> Selection:
        everyone = {one.client_id: one for one in context.clients}
        count = context.count or len(everyone)
        most_samples = most_believed(one.sample_count for one in everyone.values())
        weights = {name: min(float(one.sample_count), most_samples) for name, one in everyone.items()}
        drawn = without_replacement(weights, math.ceil(self.candidates * count), context.stream("candidates"))
        memory: ChoiceMemory = context.memory
        losses = {name: self._loss(everyone[name]) for name in drawn}
        had = had_their_share(
            memory.choices,
            round_number=context.round,
            wanted=count,
            known=len(everyone),
            most_often=self.most_often,
        )

        def place(name: str) -> tuple[bool, float]:
            return name in had, -losses[name]

        # The draw's own order decides between equal losses.
        clients = tuple(sorted(drawn, key=place)[:count])
        choices = with_choice(memory.choices, context.round, clients)
        return Selection(clients=clients, memory=ChoiceMemory(choices=choices))

    def _loss(self, client: AvailableClient) -> float:
        """Of whom nothing is known comes first."""
        told = client.past if self.losses == "reported" else client.evaluation
        return math.inf if told is None else told.loss
