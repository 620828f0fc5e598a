"""FedTrans: a small model, from which larger ones grow for the clients that can carry them.

Zhu et al., "FedTrans: Efficient Federated Learning via Multi-Model Transformation", MLSys 2024.

Client half: train the given network with the given objective.
Server half: each client draws one of the networks that it can carry, by utilities that its losses move. Each network is
the mean of its own clients' weights, and takes in what smaller ones have learned. Where the newest learns little more,
another grows from it: the cells that move most become wider or deeper, and the new one begins as what it grew from. No
round waits for it: clients draw it once the programs that train it are written.
What clients tell of their losses counts as `joint_utility.believed` bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.lineage import Drawn, Inheritance, Lineage
from subfleet.methods.aggregator import BY_SAMPLES, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assignment, AssignmentContext
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.joint_utility import Utilities, believed, inherited, moved_utilities, odds
from subfleet.methods.local_training import LocalTraining
from subfleet.methods.roles import ClosedRound, Memory, Roles
from subfleet.methods.run_networks import BeginContext, Evolution, EvolutionContext, Networks, StandingContext
from subfleet.methods.sizes import one_model, whole_depth
from subfleet.methods.soft_sharing import DecayBy, Share, SoftSharing
from subfleet.methods.transforming import Shares, activeness, convergence, copied, moving, transformed
from subfleet.methods.turns import trimmed_mean
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Amount, Count, Fraction, Positive, PositiveFraction
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.search.candidates import Candidate
from subfleet.search.queue import RequestedProgram, SizedProgram

__all__ = ["FedTrans", "FedTransMemory", "Growth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTransMemory:
    """What is remembered of clients and networks.

    Attributes:
        utilities: of each network for each client that has trained, as far as they are not 0.
        losses: the moving loss of the newest network's clients, one for each round in which it had some.
        wide: cells of that network whose last change was to become wider.
        best: the best accuracy of a round before those of `accuracies`.
        accuracies: of the last rounds, up to those that are looked at before a run ends.
    """

    utilities: Utilities = field(default_factory=lambda: MappingProxyType({}))
    losses: tuple[float, ...] = ()
    wide: tuple[str, ...] = ()
    best: float = 0.0
    accuracies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a round has come to.

    Attributes:
        parameters: in the cells of each network.
        newest: the network that appeared last before.
        born: the network that appears; empty where none does.
        wide: its cells whose last change was to become wider.
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
    """Parameters of FedTrans. Where its text leaves one open, the default says so.

    Attributes:
        first: the model that the run begins with: "weakest" is the configured one at the largest of the run's width
            rates at which the clients of the first round can carry it, but for those that are left behind;
            "configured" the whole of it.
        left_behind: share of these clients that need not be able to carry it, 0 to 1, so that one of many that claims
            to have next to nothing does not keep it small. By default that is one of ten, and none of fewer.
        alpha: a cell is changed whose activeness is this fraction of the largest or more, 0 to 1.
        beta: a network grows where the degree of convergence is this or less.
        gamma: rounds that the degree is a mean over, 1 or more.
        delta: rounds over which each fall of the loss is measured, 1 or more; left open.
        smoothing: how much a round's loss counts in the moving loss, above 0 to 1; left open.
        factor: by which cells become wider, above 1.
        inserted: cells behind one that becomes deeper, 1 or more.
        averaged: the mean of a round's losses is "trimmed", without the largest and the smallest quarter of them, or
            "all", as published, by which one client's claims hold growth up or bring it on.
        slopes: of the loss, whose mean the degree of convergence is: the "latest", or the "first" since the network
            appeared, as equation 1 reads to the letter, whose index then has nothing to do with the round.
        divided: see `Replicated`; "compute" is as printed.
        shares: see `Shares`; "equal" is published.
        noise: what is added to copies; see `Replicated`.
        cells: "active" changes those that move most; "random" as many others, for comparison.
        warm_up: a network begins as what it grew from; else with first weights of its own, for comparison.
        newborn: a new network's utility for a client: that of what it grew from, or "zero"; left open.
        share: see `Share`; "crop" is published.
        decay: of what is shared, for each round, 0 to 1; left open.
        decay_by: see `DecayBy`; "run" is published, by which late networks take in next to nothing.
        normalised: False is as printed; see `SoftSharing`.
        large_to_small: larger networks give to smaller ones, too, which the paper shows to harm.
        compatible: what a client can carry: "measured" by memory, link and compute, "macs" by compute alone, as
            published, as far as the programs' plans allow.
        stop_rounds: a run ends where accuracy has gained too little in as many rounds; 0 has it go on to its end.
        stop_gain: the gain that is too little is below this, 0 to 1.
        mu: coefficient of FedProx's term, by which a proximal term is added (mu), 0 or more; 0 is without.
        weighting: how much an update counts.
    """

    TYPE: ClassVar[str] = "fedtrans"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedTrans",
        paper="Zhu et al., FedTrans: Efficient Federated Learning via Multi-Model Transformation, MLSys 2024",
        varies=(),
        published={
            "first": Published(value="configured", told="the first model is as wide as the weakest clients can train"),
            "left_behind": None,
            "alpha": Published(value=0.9),
            "beta": Published(value=0.003),
            "gamma": Published(value=10),
            "delta": None,
            "smoothing": None,
            "factor": Published(value=2.0),
            "inserted": Published(value=1),
            "averaged": Published(value="all", told="a round's loss is a trimmed mean"),
            "slopes": Published(value="first", told="growth depends on a model's latest losses"),
            "divided": Published(
                value="compute", told="weights that read a widened cell are divided", matters=_warms_up
            ),
            "shares": Published(value="equal", told="copies have drawn fractions, so they diverge", matters=_warms_up),
            "noise": Published(value=0.0, told="noise is added to copies", matters=_warms_up),
            "cells": Published(value="active", told="cells are changed at random"),
            "warm_up": Published(value=True, told="new models start with random weights"),
            "newborn": None,
            "share": Published(
                value="crop",
                told={
                    "transform": "models share weights through their growth maps",
                    "none": "nothing is shared between models",
                },
            ),
            "decay": None,
            "decay_by": Published(value="run", told="sharing decays with a model's own age", matters=_shares),
            "normalised": Published(value=False, told="sharing does not change weights that agree", matters=_shares),
            "large_to_small": Published(value=False, told="large models share with small ones", matters=_shares),
            "compatible": Published(value="macs", told="a client's capacity is measured"),
            "stop_rounds": Published(value=10),
            "stop_gain": Published(value=0.01, matters=lambda method: method.stop_rounds > 0),
            "mu": Published(value=0.0, told="a proximal term is added (mu)"),
            "weighting": BY_SAMPLES,
        },
    )
    first: Literal["weakest", "configured"] = "weakest"
    left_behind: Fraction = 0.1
    alpha: Fraction = 0.9
    beta: Annotated[float, Range(words="such as -1e9, with which no network grows")] = 0.003
    gamma: Positive = 10
    delta: Positive = 5
    smoothing: PositiveFraction = 0.2
    factor: Annotated[float, Range(above=1)] = 2.0
    inserted: Positive = 1
    averaged: Literal["trimmed", "all"] = "trimmed"
    slopes: Literal["latest", "first"] = "latest"
    divided: Literal["read", "compute"] = "read"
    shares: Shares = "drawn"
    noise: Amount = 0.0
    cells: Literal["active", "random"] = "active"
    warm_up: bool = True
    newborn: Literal["parent", "zero"] = "parent"
    share: Share = "transform"
    decay: Fraction = 0.98
    decay_by: DecayBy = "network"
    normalised: bool = True
    large_to_small: bool = False
    compatible: Literal["measured", "macs"] = "measured"
    stop_rounds: Count = 10
    stop_gain: Fraction = 0.01
    mu: Amount = 0.0
    weighting: Weighting = "samples"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return (
            "a new model is assigned once its programs are exported",
            *those_true({"copied channels are drawn about equally often": self.warm_up}),
        )

    def roles(self) -> Roles:
        """A network in each size that clients can carry."""
        weakest = self.first == "weakest"
        return Roles(
            networks=Networks(
                begin=partial(_begin, self.left_behind) if weakest else None, evolve=self._evolve, standing=_standing
            ),
            memory=Memory(initial=FedTransMemory(), remember=self._remember, stop=self._stop),
            assigner=replace(one_model("largest"), assign=self._assign, lasting=weakest, awaits_programs=False),
            training=LocalTraining(for_round=self._for_round) if self.mu else LocalTraining(),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="network"),
        )

    def _for_round(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        return replace(settings, objective=replace(settings.objective, proximal=True), proximal_mu=self.mu)

    def _assign(self, context: AssignmentContext) -> Assignment:
        """One of the networks that the client can carry whose programs are written, drawn by their utilities."""
        memory: FedTransMemory = context.draw.memory
        able = [one for one in context.candidates if self._carries(context, one)]
        if not able:
            return Assignment(candidate=None)
        written = [one for one in able if one.architecture.architecture_id in context.written]
        unwritten = [one for one in able if one.architecture.architecture_id not in context.written]
        requested_program = None
        if unwritten:
            requested_program = RequestedProgram(
                program=SizedProgram(size=unwritten[-1].architecture, target=context.target), lost=1.0
            )
        if not written:  # at first, when nothing is
            return Assignment(candidate=able[0], wanted=requested_program if len(able) > 1 else None)
        own = memory.utilities.get(context.draw.client_id, {})
        chances = odds([own.get(one.architecture.network, 0.0) for one in written])
        (drawn,) = context.draw.stream("network").choices(written, chances)
        return Assignment(candidate=drawn, wanted=requested_program)

    def _carries(self, context: AssignmentContext, candidate: Candidate) -> bool:
        if self.compatible == "measured":
            return context.allows(candidate)
        most = context.budget.forward_macs
        return not context.barred(candidate) and (most is None or candidate.forward_macs <= most)

    def _evolve(self, context: EvolutionContext) -> Evolution:
        """The networks after they have shared, and the one that grows from the newest where that learns no more."""
        from subfleet.elastic.cells import count_cell_parameters

        parameters = {name: sum(count_cell_parameters(one).values()) for name, one in context.networks.items()}
        sharing = SoftSharing(
            share=self.share,
            decay=self.decay,
            decay_by=self.decay_by,
            normalised=self.normalised,
            both_ways=self.large_to_small,
        )
        states = {name: context.after.of(name).shared for name in context.networks}
        living = [one for one in context.lineages if one.living]
        shared = sharing.shared(living, context.networks, states, parameters, context.round)
        after = context.after
        for name, weights in shared.items():
            after = after.with_network(name, replace(after.of(name), shared=weights))
        born, wide = self._born(context, living)
        found = Growth(parameters=parameters, newest=living[-1].id, born=born.id if born else "", wide=wide)
        return Evolution(after=after, born=(born,) if born else (), observation=found)

    def _born(self, context: EvolutionContext, living: Sequence[Lineage]) -> tuple[Lineage | None, tuple[str, ...]]:
        """The network that grows from the newest, and its cells that were made wider; None where none does."""
        memory, network = context.memory, context.networks[living[-1].id]
        told = believed(context.losses)
        losses = [told[one.client_id] for one in context.clients if one.size.network == network.id]
        if not losses:
            return None, ()
        row = self._moved(memory, losses)
        looked_at = row if self.slopes == "latest" else row[: self.gamma + self.delta]
        fallen = convergence(looked_at, gamma=self.gamma, delta=self.delta)
        if math.isinf(fallen) or fallen > self.beta:
            return None, ()
        moved = activeness(network, context.before.of(network.id).shared, context.after.of(network.id).shared)
        cells = [name for name, one in moved.items() if one >= self.alpha * max(moved.values())]
        if self.cells == "random":
            cells = context.stream("cells").sample(sorted(moved), len(cells))
        change = transformed(network, cells, memory.wide, factor=self.factor, inserted=self.inserted)
        if change is None:
            return None, ()
        how: Inheritance = Drawn()
        if self.warm_up:
            grown_by = copied(network, change.config, context.stream("copies"), shares=self.shares)
            how = replace(grown_by, noise=self.noise, divided=self.divided)
        lineage = Lineage(
            id=f"m{len(living)}",
            config=change.config,
            parent=network.id,
            map=how,
            born_round=context.round,
            reason=f"{change.told}, as its loss fell by {fallen:.4g} a round",
        )
        return (lineage, change.wide) if context.carried_by(lineage) else (None, ())

    def _moved(self, memory: FedTransMemory, losses: list[float]) -> tuple[float, ...]:
        each = [1.0] * len(losses)
        loss = trimmed_mean(losses, each) if self.averaged == "trimmed" else math.fsum(losses) / len(losses)
        return moving(memory.losses, loss, self.smoothing)

    def _remember(self, memory: FedTransMemory, closed: ClosedRound) -> FedTransMemory:
        found: Growth | None = closed.observation
        if found is None:  # a round that measures norms
            return memory
        told = believed({name: past.loss for name, past in closed.clients.items()})
        losses = [told[name] for name, past in closed.clients.items() if past.size.network == found.newest]
        utilities = moved_utilities(memory.utilities, closed.clients, found.parameters)
        seen = (*memory.accuracies, closed.accuracy)
        left = len(seen) - self.stop_rounds
        after = replace(
            memory,
            utilities=utilities,
            losses=self._moved(memory, losses) if losses else memory.losses,
            best=max((memory.best, *seen[: max(left, 0)])),
            accuracies=seen[max(left, 0) :],
        )
        if not found.born:
            return after
        if self.newborn == "parent":
            utilities = inherited(utilities, found.born, found.newest)
        return replace(after, utilities=utilities, losses=(), wide=found.wide)

    def _stop(self, memory: FedTransMemory) -> str:
        if not self.stop_rounds or len(memory.accuracies) < self.stop_rounds or not memory.best:
            return ""
        gain = max(memory.accuracies) - memory.best
        return (
            f"its accuracy has gained {gain:.4f} in {self.stop_rounds} rounds, which is less than {self.stop_gain:g}"
            if gain < self.stop_gain
            else ""
        )


def _begin(left_behind: float, context: BeginContext) -> tuple[Lineage, ...]:
    """The configured network, as wide as enough clients can carry it; the narrowest where none is narrow enough."""
    from subfleet.elastic.resizing import derive_settings

    network, found = context.network, None
    for size in reversed(whole_depth(network, context.rates)):
        try:
            config = derive_settings(network, size)
        except ConfigError:  # a size that its family cannot say
            continue
        reason = f"the configured network at {size.name}, for the weakest device"
        found = Lineage(id="m0", config=config, reason=reason)
        if len(context.carried_by(found)) >= (1 - left_behind) * len(context.clients):
            break
    return () if found is None or found.config == network.config else (found,)


def _standing(context: StandingContext) -> Architecture:
    """The network of the highest utility of those that the client can have, of equals the newest."""
    memory: FedTransMemory = context.memory
    own = memory.utilities.get(context.client.client_id, {})
    sizes = [network.full_architecture() for network in context.networks.values()]
    ready = [(own.get(size.network, 0.0), place) for place, size in enumerate(sizes) if context.ready(size)]
    return sizes[max(ready)[1]]
