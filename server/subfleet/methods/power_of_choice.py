"""Power-of-choice: some clients are drawn as candidates, and those with the largest losses take part.

Cho et al., "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022, section 4 (first as
"Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection Strategies", 2020).

Client half: train the given model with the given objective.
Server half: candidates are drawn without replacement, with probabilities in proportion to their samples; of these, the
clients with the largest losses train. A loss is the one that a client reported with its last aggregated update, so that
it costs no extra message (the paper's rpow-d); a client without one counts as having an infinite loss, as in the paper.
Samples and losses are claims: samples count up to three standard deviations above the median, and a client that was
selected too often comes last, whether it answered or not.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Weighting, weigh_by
from subfleet.methods.claims import PastSelection, add_selection, bound_claims, find_overselected
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Memory, Roles
from subfleet.methods.selector import AvailableClient, Selection, SelectionContext, Selector, draw_without_replacement
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMemory:
    """The memory of Power-of-choice: the clients that the last rounds selected."""

    choices: tuple[PastSelection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PowerOfChoice:
    """Parameters of Power-of-choice.

    Attributes:
        candidates: d over the number of clients in a round, 1 or more; the paper tries 2 to 10. With 1, clients are
            drawn by their samples.
        model: which models are trained.
        losses: "reported", the loss of a client's last update, as in the paper's rpow-d; "evaluated", the loss of the
            current model on the client's held-out data, where the paper's pow-d uses all data. The latter needs
            `[evaluation] every = 1`, and devices with held-out data.
        most_often: how often a client is selected at most, as a multiple of taking turns, while there are others; 0 is
            no limit.
        weighting: "uniform" as in the paper, because the draw has counted the samples; or "samples".
    """

    TYPE: ClassVar[str] = "power_of_choice"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Power-of-choice",
        paper="Cho et al., Towards Understanding Biased Client Selection in Federated Learning, AISTATS 2022",
        departures={"samples count up to three standard deviations above the median": always},
    )
    candidates: Annotated[float, Range(least=1)] = 2.0
    model: Homogeneous = parameter("largest", otherwise=NESTED)
    losses: Literal["reported", "evaluated"] = parameter(
        "reported",
        paper="of the model, on all data of a client",
        otherwise={
            "reported": "clients are selected by their last reported losses (the paper's rpow-d)",
            "evaluated": "losses are computed on held-out data",
        },
    )
    most_often: Amount = parameter(1.5, paper=0.0, otherwise="clients selected too often come last")
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)

    def roles(self) -> Roles:
        """FedAvg of the clients with the largest losses."""
        return Roles(
            selector=Selector(select=self._select, needs_evaluations=self.losses == "evaluated"),
            memory=Memory(initial=ChoiceMemory()),
            assigner=assign_homogeneous(self.model),
            aggregator=Aggregator(weigh=weigh_by(self.weighting)),
        )

    def _select(self, context: SelectionContext) -> Selection:
        memory: ChoiceMemory = context.memory
        clients = {client.client_id: client for client in context.clients}
        count = context.count or len(clients)
        most_samples = bound_claims(client.sample_count for client in clients.values())
        weights = {name: min(float(client.sample_count), most_samples) for name, client in clients.items()}
        candidates = draw_without_replacement(weights, math.ceil(self.candidates * count), context.stream("candidates"))
        resting = find_overselected(context, memory.choices, count, self.most_often)
        # Between equal losses, the order of the draw decides.
        ranked = sorted(candidates, key=lambda name: (name in resting, -self._find_loss(clients[name])))
        selected = tuple(ranked[:count])
        return Selection(
            clients=selected, memory=ChoiceMemory(choices=add_selection(memory.choices, context.round, selected))
        )

    def _find_loss(self, client: AvailableClient) -> float:
        """The client's loss; infinite if unknown."""
        known = client.past if self.losses == "reported" else client.evaluation
        return math.inf if known is None else known.loss
