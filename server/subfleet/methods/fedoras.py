"""FedorAS: a supernet that devices train path by path, a search of it for each tier of devices, and fine-tuning.

Dudziak et al., "FedorAS: Federated Architecture Search under system heterogeneity", section 3.

Client half: in the first stage it draws a path of its subspace for each batch, within the compute and memory that it
can give when its task begins, takes one step, and tells how many examples went through each operator (section 3.1, 2).
In the last stage it trains its tier's network, or that of a tier below, as in federated averaging (section 3.3).
Tiers take turns: each has rounds of its own, with clients of that tier and above.
Server half: it gives each client a subspace of its own within a budget of bytes (equation 1), averages each operator
by the examples that went through it, and keeps it where too few clients had it (OPA, equation 5); then it searches,
tier by tier, for the path that does best on validation data (equation 6), which becomes a network of the run.

What the text says and its public code does not: subspaces differ between clients, what is not in them is not sent, and
weights of operators count by their own examples. A budget may be taken whole ("<=", where equation 3 has "<"), and what
places still to come need at least is set aside, without which the printed draw can end where nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.elastic.cost import part_costs
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator, Participant
from subfleet.methods.assigner import Assignment, AssignmentContext
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.local_training import LocalTraining
from subfleet.methods.roles import Memory, Roles
from subfleet.methods.run_networks import Networks, StandingContext
from subfleet.methods.selector import Selection, SelectionContext, Selector, at_random
from subfleet.methods.sizes import one_model
from subfleet.methods.subspacing import Subspaces, drawn_tier
from subfleet.methods.tier_search import TierMemory, TierSearch, tier_of
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import MAX_SINGLE, Positive, PositiveFraction
from subfleet.protocol.messages import Update
from subfleet.protocol.paths import OperatorExamples, PathSampler
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

__all__ = ["FedorAS"]

_LAST_RATE = 0.1
"""Of the learning rate of fine-tuning, at its end (the public code's schedule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedorAS:
    """Parameters of FedorAS. A run's rounds are those of the supernet, then those of fine-tuning, tiers in turns.

    Attributes:
        supernet_rounds: of the first stage, 1 or more; the search follows the last of them.
        subspace: fraction of the bytes of all operators that a client is sent at most, above 0 to 1 (equation 1).
        path_sampler: how paths are drawn on devices.
        aggregation: what an operator's update counts by: "operators" by the examples that went through it; "clients" by
            the client's samples, whatever it drew, as in plain averaging.
        min_contributors: clients that must have trained an operator for it to move, 1 or more; the public code has 1.
        tiers: of devices, 1 or more.
        tiers_by: "measured" goes by what devices can compute for a sample, and devices that do not tell that are of the
            highest tier; "drawn" gives each client a tier of its own for the run, all equally likely, as published.
        search: how each tier is searched.
        start: with what the networks that are found begin: the "supernet"'s weights, or "fresh" ones, for comparison.
        tuning_epochs: of each client in a round of fine-tuning, 1 or more.
        tuning_learning_rate: of a network's first round of fine-tuning, 0 or more.
        tuning_rounds: of each tier's network, within which it falls to a tenth along half a cosine, 1 or more; a run
            needs as many for each of its tiers.
    """

    TYPE: ClassVar[str] = "fedoras"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedorAS",
        paper="Dudziak et al., FedorAS: Federated Architecture Search under system heterogeneity, 2022",
        varies=("operator",),
        published={
            "supernet_rounds": None,  # 500 to 750, by data set
            "subspace": Published(value=0.5),
            "path_sampler": Published(value="greedy", told="paths are drawn uniformly from all valid ones"),
            "aggregation": Published(value="operators", told="operators are averaged by clients' samples"),
            "min_contributors": Published(value=2, told={1: "an operator trained by a single client is aggregated"}),
            "tiers": None,  # 4 or 5, by data set
            "tiers_by": Published(value="drawn", told="tiers depend on the devices' compute"),
            "search.evolution.objectives": Published(
                value="accuracy_macs",
                told="the search maximises accuracy alone; the paper's NSGA-II also minimises size",
            ),
            "search.evolution.evaluations": None,
            "search.evolution.population": None,
            "search.evolution.offspring": None,
            "search.evolution.mutation": None,
            "search.evolution.target": None,
            "search.scoring": None,  # both are the paper's
            "search.scoring_clients": None,
            "search.scoring_rounds": None,
            "start": Published(value="supernet", told="searched networks start with fresh weights"),
            "tuning_epochs": Published(value=1),
            "tuning_learning_rate": Published(value=0.01),
            "tuning_rounds": Published(value=100),
        },
    )
    supernet_rounds: Positive = 500
    subspace: PositiveFraction = 0.5
    path_sampler: PathSampler = "greedy"
    aggregation: Literal["operators", "clients"] = "operators"
    min_contributors: Positive = 2
    tiers: Positive = 4
    tiers_by: Literal["measured", "drawn"] = "measured"
    search: TierSearch = field(default_factory=TierSearch)
    start: Literal["supernet", "fresh"] = "supernet"
    tuning_epochs: Positive = 1
    tuning_learning_rate: Annotated[float, Range(least=0, below=MAX_SINGLE)] = 0.01
    tuning_rounds: Positive = 100

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        trimmed = "of devices' scores of a path the best and the worst quarter are left out"
        return those_true({trimmed: self.search.scoring == "devices"})

    def roles(self) -> Roles:
        """A subspace of the supernet for each client, then a network for each tier."""
        search = replace(self.search, tiers=self.tiers)
        aggregator = Aggregator(
            min_contributors=lambda network: self.min_contributors if network.choices else 1, model="tier"
        )
        if self.aggregation == "operators":
            aggregator = replace(aggregator, weigh=_weigh_by_examples, factors=_by_operator)
        return Roles(
            networks=Networks(
                path_search=search.path_search(self.supernet_rounds, fresh=self.start == "fresh"),
                standing=self._standing,
            ),
            memory=Memory(initial=TierMemory()),
            selector=Selector(select=self._select),
            assigner=replace(one_model("largest"), assign=self._assign),
            training=LocalTraining(for_round=self._for_round, draws_paths=True),
            aggregator=aggregator,
        )

    def _assign(self, context: AssignmentContext) -> Assignment:
        supernet = next((one for one in context.networks.values() if one.choices), None)
        if supernet is not None:
            drawn = self.tiers_by == "drawn"
            spaces = Subspaces(share=self.subspace, sampler=self.path_sampler, tiers=self.tiers, drawn=drawn)
            return spaces.assign(context, supernet)
        highest = self._highest(context.draw.seed, context.draw.client_id)
        able = {
            tier_of(one.architecture): one
            for one in context.candidates
            if context.allows(one) and tier_of(one.architecture) <= highest
        }
        turn = next((tier for tier in self._in_turn(context.draw.round, able)), None)
        return Assignment(candidate=None if turn is None else able[turn])

    def _select(self, context: SelectionContext) -> Selection:
        """In fine-tuning those of the tier whose turn it is, and above it (section 3.3)."""
        networks = {tier_of(one.full_architecture()): one for one in context.networks.values()}
        if any(one.choices for one in networks.values()):
            return at_random(context)
        for tier in self._in_turn(context.round, networks):
            macs = sum(macs for _, macs in part_costs(networks[tier]).values())
            able = [
                one
                for one in context.clients
                if (one.budget.forward_macs is None or macs <= one.budget.forward_macs)
                and tier <= self._highest(context.seed, one.client_id)
            ]
            if able:
                return at_random(replace(context, clients=tuple(able)))
        return at_random(context)

    def _in_turn(self, round_number: int, tiers: Iterable[int]) -> list[int]:
        """Of these tiers the one whose round of fine-tuning it is, or that comes nearest to it, then the others."""
        turn = (round_number - 1 - self.supernet_rounds) % self.tiers + 1
        return sorted(tiers, key=lambda tier: (tier > turn, abs(turn - tier)))

    def _highest(self, seed: int, client_id: str) -> float:
        """The highest tier whose network a client may have, where it is one that it can train."""
        return drawn_tier(seed, client_id, self.tiers) if self.tiers_by == "drawn" else math.inf

    def _standing(self, context: StandingContext) -> Architecture:
        """Of the networks that a client can have, that of the highest tier."""
        highest = self._highest(context.seed, context.client.client_id)
        sizes = sorted((one.full_architecture() for one in context.networks.values()), key=tier_of)
        able = [size for size in sizes if tier_of(size) <= highest] or sizes[:1]
        ready = [size for size in able if context.ready(size)]
        return (ready or able[:1])[-1]

    def _for_round(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        done = round_number - 1 - self.supernet_rounds
        if done < 0:
            return settings
        turn = min(done // self.tiers / self.tuning_rounds, 1.0) * math.pi
        share = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(turn)) / 2
        return replace(
            settings, epochs=self.tuning_epochs, local_steps=0, learning_rate=self.tuning_learning_rate * share
        )


def _total(examples: OperatorExamples) -> int:
    """How many examples a client trained on: they went through one operator of each choice."""
    return max((sum(count for _, count in counts) for _, counts in examples), default=0)


def _weigh_by_examples(update: Update) -> float:
    return float(_total(update.operator_examples) or update.sample_count)


def _by_operator(network: Network, client: Participant) -> Mapping[str, float | Tensor]:
    """Each operator's tensors count by its own fraction of the client's examples (OPA, equation 5)."""
    total = _total(client.examples)
    if not total or not network.choices:
        return {}
    shares = {f"{choice}.{operator}": count / total for choice, counts in client.examples for operator, count in counts}
    return {
        name: shares.get(decl.part, 0.0)
        for name, decl in network.tensors.items()
        if decl.part is not None and decl.part in network.parts_of(client.architecture)
    }
