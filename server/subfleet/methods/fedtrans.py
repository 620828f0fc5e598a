"""FedTrans: a small model, from which larger ones grow for the clients that can carry them.

Zhu et al., "FedTrans: Efficient Federated Learning via Multi-Model Transformation", MLSys 2024.

Client half: train the given network with the given objective.
Server half: each client draws one of the networks that it can carry, by utilities that follow from its losses. Each
network is the mean of its own clients' weights, and takes in what smaller ones have learned. When the newest one stops
learning, another grows from it: the cells that move most become wider or deeper, and the new network computes the same
at first. No round waits for it: clients draw it once its training programs are written.
Reported losses are clipped (`growth.clip_losses`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.lineage import Drawn, Inheritance, Lineage
from subfleet.methods import growth
from subfleet.methods.aggregator import COUNTED_EQUALLY, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assignment, AssignmentContext
from subfleet.methods.claims import trimmed_mean
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.growth import Share, Shares, Utilities
from subfleet.methods.roles import ClosedRound, LocalTraining, Memory, Roles, train_near_received
from subfleet.methods.run_networks import BeginContext, Evolution, EvolutionContext, Networks, StandingContext
from subfleet.methods.sizes import assign_homogeneous, list_widths
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Amount, Count, Fraction, Positive, PositiveFraction
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.queue import RequestedProgram, SizedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTransMemory:
    """The memory of FedTrans.

    Attributes:
        utilities: of each network for each client that has trained, if they are not 0.
        losses: the moving average of the losses of the newest network's clients, for each round in which it had some.
        wide: cells of that network that became wider in their last change.
        best: the best accuracy of a round before those of `accuracies`.
        accuracies: of the last `stop_rounds` rounds.
    """

    utilities: Utilities = field(default_factory=lambda: MappingProxyType({}))
    losses: tuple[float, ...] = ()
    wide: tuple[str, ...] = ()
    best: float = 0.0
    accuracies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The networks after a round.

    Attributes:
        parameters: by network, those in its cells.
        newest: the network that was the newest one in the round.
        born: the network that appears; empty if none does.
        wide: its cells that became wider in their last change.
    """

    parameters: Mapping[str, int]
    newest: str
    born: str = ""
    wide: tuple[str, ...] = ()


def _warms_up(method: FedTrans) -> bool:
    return method.warm_up


def _shares(method: FedTrans) -> bool:
    return method.share != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedTrans:
    """Parameters of FedTrans; "left open" marks those without a value in the paper.

    Attributes:
        first: the model that the run begins with: "weakest", the configured one at the largest of the run's width rates
            that the clients of the first round can carry, except clients that are left behind; "configured", the whole
            one.
        left_behind: fraction of these clients that need not be able to carry it, 0 to 1, so that one of many clients
            that claims a tiny budget does not keep it small. By default that is one of ten, and none of fewer.
        alpha: cells change if their activeness is at least this fraction of the largest, 0 to 1.
        beta: a network grows if the degree of convergence is at most this.
        gamma: rounds over which the degree is a mean, 1 or more.
        delta: rounds over which each fall of the loss is measured, 1 or more; left open.
        smoothing: weight of a round's loss in the moving average, above 0 to 1; left open.
        factor: by which cells become wider, above 1.
        inserted: cells after one that becomes deeper, 1 or more.
        averaged: the mean of a round's losses is "trimmed", without the largest and the smallest quarter of them, or
            over "all", as published, with which one client's claims can delay or force growth.
        slopes: of the loss, for the degree of convergence: the "latest" ones, or the "first" ones since the network
            appeared, as equation 1 literally says.
        divided: see `Replicated`; "compute" is as printed.
        shares: see `Shares`; "equal" is published.
        noise: added to copies; see `Replicated`.
        cells: "active" changes the cells that move most; "random" as many others, for comparison.
        warm_up: a network begins with its parent's weights; else with fresh ones, for comparison.
        share: see `Share`; "crop" is published.
        decay: factor on what is shared, for each round, 0 to 1; left open.
        decay_by: the decay begins when the "network" appeared, or when the "run" began, as published, with which late
            networks take in almost nothing.
        normalised: False is as printed; see `share_weights`.
        large_to_small: larger networks give to smaller ones too, which the paper shows to be harmful.
        compatible: what a client can carry: "measured" by memory, link and compute, or "macs" by compute alone, as
            published, if the programs' plans allow it.
        stop_rounds: a run ends if accuracy has gained too little in this many rounds; 0 never ends it early.
        stop_gain: a gain below this is too little, 0 to 1.
        mu: coefficient of FedProx's proximal term, 0 or more; 0 is without.
        weighting: the weight of an update.
    """

    TYPE: ClassVar[str] = "fedtrans"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedTrans",
        paper="Zhu et al., FedTrans: Efficient Federated Learning via Multi-Model Transformation, MLSys 2024",
        departures={
            "a new model is assigned once its programs are exported": always,
            "copied channels are drawn about equally often": lambda method, setting: method.warm_up,
        },
    )
    first: Literal["weakest", "configured"] = parameter(
        "weakest", paper="configured", otherwise="the first model is as wide as the weakest clients can train"
    )
    left_behind: Fraction = 0.1
    alpha: Fraction = parameter(0.9)
    beta: Annotated[float, Range(words="such as -1e9, with which no network grows")] = parameter(0.003)
    gamma: Positive = parameter(10)
    delta: Positive = 5
    smoothing: PositiveFraction = 0.2
    factor: Annotated[float, Range(above=1)] = parameter(2.0)
    inserted: Positive = parameter(1)
    averaged: Literal["trimmed", "all"] = parameter(
        "trimmed", paper="all", otherwise="a round's loss is a trimmed mean"
    )
    slopes: Literal["latest", "first"] = parameter(
        "latest", paper="first", otherwise="growth depends on a model's latest losses"
    )
    divided: Literal["read", "compute"] = parameter(
        "read", paper="compute", otherwise="weights that read a widened cell are divided", matters=_warms_up
    )
    shares: Shares = parameter(
        "drawn", paper="equal", otherwise="copies have drawn fractions, so they diverge", matters=_warms_up
    )
    noise: Amount = parameter(0.0, otherwise="noise is added to copies", matters=_warms_up)
    cells: Literal["active", "random"] = parameter("active", otherwise="cells are changed at random")
    warm_up: bool = parameter(True, otherwise="new models start with random weights")
    share: Share = parameter(
        "transform",
        paper="crop",
        otherwise={
            "transform": "models share weights through their growth maps",
            "none": "nothing is shared between models",
        },
    )
    decay: Fraction = 0.98
    decay_by: Literal["network", "run"] = parameter(
        "network", paper="run", otherwise="sharing decays with a model's own age", matters=_shares
    )
    normalised: bool = parameter(
        True, paper=False, otherwise="sharing does not change weights that agree", matters=_shares
    )
    large_to_small: bool = parameter(False, otherwise="large models share with small ones", matters=_shares)
    compatible: Literal["measured", "macs"] = parameter(
        "measured", paper="macs", otherwise="a client's capacity is measured"
    )
    stop_rounds: Count = parameter(10)
    stop_gain: Fraction = parameter(0.01, matters=lambda method: method.stop_rounds > 0)
    mu: Amount = parameter(0.0, otherwise="a proximal term is added (mu)")
    weighting: Weighting = parameter("samples", otherwise=COUNTED_EQUALLY)

    def roles(self) -> Roles:
        """Networks that grow as far as clients can carry them."""
        weakest = self.first == "weakest"
        return Roles(
            networks=Networks(
                begin=partial(_begin, self.left_behind) if weakest else None,
                evolve=self._evolve,
                standing=_find_standing,
                grows=True,
            ),
            memory=Memory(initial=FedTransMemory(), remember=self._remember, stop=self._stop),
            assigner=replace(
                assign_homogeneous("largest"), assign=self._assign, lasting=weakest, awaits_programs=False
            ),
            training=train_near_received(self.mu) if self.mu else LocalTraining(),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="network"),
        )

    def _assign(self, context: AssignmentContext) -> Assignment:
        """Draw a network that the client can carry, among those with a written program, by their utilities."""
        memory: FedTransMemory = context.draw.memory
        able = [candidate for candidate in context.candidates if self._carries(context, candidate)]
        if not able:
            return Assignment(candidate=None)
        written = [candidate for candidate in able if candidate.architecture.architecture_id in context.written]
        requested = None
        if unwritten := [candidate.architecture for candidate in able if candidate not in written]:
            requested = RequestedProgram(program=SizedProgram(size=unwritten[-1], target=context.target), lost=1.0)
        if not written:  # as at the beginning of a run
            return Assignment(candidate=able[0], requested=requested if len(able) > 1 else None)
        own = memory.utilities.get(context.draw.client_id, {})
        chances = growth.odds([own.get(candidate.architecture.network, 0.0) for candidate in written])
        (drawn,) = context.draw.stream("network").choices(written, chances)
        return Assignment(candidate=drawn, requested=requested)

    def _carries(self, context: AssignmentContext, candidate: Candidate) -> bool:
        if self.compatible == "measured":
            return context.allows(candidate)
        most = context.budget.forward_macs
        return not context.why_never(candidate) and (most is None or candidate.forward_macs <= most)

    def _evolve(self, context: EvolutionContext) -> Evolution:
        """Share weights between the networks, and grow another one if the newest has stopped learning."""
        from subfleet.elastic.growing import count_cell_parameters

        parameters = {name: sum(count_cell_parameters(network).values()) for name, network in context.networks.items()}
        states = {name: context.after.of(name).shared for name in context.networks}
        living = [lineage for lineage in context.lineages if lineage.living]
        shared = growth.share_weights(self, living, context.networks, states, parameters, context.round)
        after = context.after
        for name, weights in shared.items():
            after = after.with_network(name, replace(after.of(name), shared=weights))
        born, wide = self._grow(context, living)
        outcome = Growth(parameters=parameters, newest=living[-1].id, born=born.id if born else "", wide=wide)
        return Evolution(after=after, born=(born,) if born else (), observation=outcome)

    def _grow(self, context: EvolutionContext, living: Sequence[Lineage]) -> tuple[Lineage | None, tuple[str, ...]]:
        """The network that grows from the newest one, and its cells that became wider last; None if none grows."""
        memory, network = context.memory, context.networks[living[-1].id]
        clipped = growth.clip_losses(context.losses)
        losses = [clipped[client.client_id] for client in context.clients if client.size.network == network.id]
        if not losses:
            return None, ()
        averages = self._average(memory, losses)
        if self.slopes == "first":
            averages = averages[: self.gamma + self.delta]
        fallen = growth.convergence(averages, gamma=self.gamma, delta=self.delta)
        if math.isinf(fallen) or fallen > self.beta:
            return None, ()
        moved = growth.activeness(network, context.before.of(network.id).shared, context.after.of(network.id).shared)
        cells = [name for name, amount in moved.items() if amount >= self.alpha * max(moved.values())]
        if self.cells == "random":
            cells = context.stream("cells").sample(sorted(moved), len(cells))
        change = growth.transform_cells(network, cells, memory.wide, factor=self.factor, inserted=self.inserted)
        if change is None:
            return None, ()
        how: Inheritance = Drawn()
        if self.warm_up:
            growth_map = growth.draw_copies(network, change.config, context.stream("copies"), shares=self.shares)
            how = replace(growth_map, noise=self.noise, divided=self.divided)
        lineage = Lineage(
            id=f"m{len(living)}",
            config=change.config,
            parent=network.id,
            map=how,
            born_round=context.round,
            reason=f"{change.words}, as its loss fell by {fallen:.4g} a round",
        )
        return (lineage, change.wide) if context.carried_by(lineage) else (None, ())

    def _average(self, memory: FedTransMemory, losses: list[float]) -> tuple[float, ...]:
        """The moving averages of the loss with the one after this round."""
        weights = [1.0] * len(losses)
        loss = trimmed_mean(losses, weights) if self.averaged == "trimmed" else math.fsum(losses) / len(losses)
        before = memory.losses
        return (*before, (1 - self.smoothing) * before[-1] + self.smoothing * loss if before else loss)

    def _remember(self, memory: FedTransMemory, closed: ClosedRound) -> FedTransMemory:
        outcome: Growth | None = closed.observation
        if outcome is None:  # a round that measures norms
            return memory
        clipped = growth.clip_losses({name: past.loss for name, past in closed.clients.items()})
        losses = [clipped[name] for name, past in closed.clients.items() if past.size.network == outcome.newest]
        utilities = growth.update_utilities(memory.utilities, closed.clients, outcome.parameters)
        seen = (*memory.accuracies, closed.accuracy)
        left = len(seen) - self.stop_rounds
        after = replace(
            memory,
            utilities=utilities,
            losses=self._average(memory, losses) if losses else memory.losses,
            best=max((memory.best, *seen[: max(left, 0)])),
            accuracies=seen[max(left, 0) :],
        )
        if not outcome.born:
            return after
        utilities = growth.inherit_utilities(utilities, outcome.born, outcome.newest)
        return replace(after, utilities=utilities, losses=(), wide=outcome.wide)

    def _stop(self, memory: FedTransMemory) -> str:
        if not self.stop_rounds or len(memory.accuracies) < self.stop_rounds or not memory.best:
            return ""
        gain = max(memory.accuracies) - memory.best
        why = f"its accuracy has gained {gain:.4f} in {self.stop_rounds} rounds, which is less than {self.stop_gain:g}"
        return why if gain < self.stop_gain else ""


def _begin(left_behind: float, context: BeginContext) -> tuple[Lineage, ...]:
    """The configured network, as wide as enough clients can carry it; the narrowest if even that is too wide."""
    from subfleet.elastic.growing import derive_settings

    network, first = context.network, None
    for size in reversed(list_widths(network, context.rates)):
        try:
            config = derive_settings(network, size)
        except ConfigError:  # the family has no settings for this size
            continue
        reason = f"the configured network at {size.name}, for the weakest device"
        first = Lineage(id="m0", config=config, reason=reason)
        if len(context.carried_by(first)) >= (1 - left_behind) * len(context.clients):
            break
    return () if first is None or first.config == network.config else (first,)


def _find_standing(context: StandingContext) -> Architecture:
    """The network with the highest utility that the client can have; among equals, the newest."""
    memory: FedTransMemory = context.memory
    own = memory.utilities.get(context.client.client_id, {})
    sizes = [network.full_architecture() for network in context.networks.values()]
    ready = [(own.get(size.network, 0.0), index) for index, size in enumerate(sizes) if context.ready(size)]
    return sizes[max(ready)[1]]
