"""The assigner of a method: which submodel each client of a round gets, and where it lies in the model."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import Exchange, Participant, Tensor
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, Limit, Obstacle, find_obstacles
from subfleet.search.query import CostEstimates, FoundSize, Search
from subfleet.search.queue import ProgramFacts, RequestedProgram, find_program_obstacles

__all__ = ["Assigner", "Assignment", "AssignmentContext", "Draw", "assign_largest", "draw_size"]


def open_stream(text: str) -> random.Random:
    """The stream of random numbers that a text names."""
    return random.Random(hashlib.sha256(text.encode()).digest())  # noqa: S311 - draws sizes, keeps no secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The source of a method's random choices: a function of run, round and client alone.

    Attributes:
        memory: what the method remembered when the round's clients were selected.
    """

    seed: int
    round: int
    client_id: str
    memory: Any = None

    def stream(self, purpose: str) -> random.Random:
        """Random numbers for one purpose."""
        return open_stream(f"{self.seed}/{self.round}/{self.client_id}/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSize:
    """A size with the program that was written for it, or could not be.

    Attributes:
        facts: of the program, with its memory as planned for the client's device.
        estimate: the cost estimate of the size, if it was made before.
    """

    size: Architecture
    facts: ProgramFacts
    estimate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentContext:
    """A client that needs a submodel.

    Attributes:
        networks: the networks in use, by id; most methods have one.
        candidates: the sizes of the method's space with their costs, from smallest to largest, of all these networks.
        estimate: estimates the cost of any submodel of them.
        target: the program target that the device runs.
        budget: what the device can give now.
        previous: the size that it trained last; None before its first round.
        below: a candidate that could not be run in this round; only smaller ones may be assigned.
        below_limit: what that program exceeded.
        search: the state of the method's search; None without one.
        written: by id of a size, the programs for this target that were written before this round.
        operators: of the device's runtime; empty if unknown, and every program is tried.
        refused: by id of a size, why the device cannot run its program, whatever the budget.
        declared: the size that the device has declared, if the method uses declarations.
        lasting: what its log has most of the time, if the method asks for that and the device replays a log.
    """

    networks: Mapping[str, Network]
    candidates: Sequence[Candidate]
    estimate: CostEstimates
    draw: Draw
    target: str
    budget: Budget
    previous: Architecture | None = None
    below: Candidate | None = None
    below_limit: Limit = "memory"
    search: Search | None = None
    written: Mapping[str, WrittenSize] = field(default_factory=lambda: MappingProxyType({}))
    operators: tuple[str, ...] = ()
    refused: Mapping[str, Obstacle] = field(default_factory=lambda: MappingProxyType({}))
    declared: Architecture | None = None
    lasting: Budget | None = None

    @property
    def fitting(self) -> list[Candidate]:
        """The candidates that may be assigned, from smallest to largest."""
        return [candidate for candidate in self.candidates if self.allows(candidate)]

    def of_network(self, network_id: str) -> AssignmentContext:
        """The same with the candidates of one network."""
        if len(self.networks) == 1:
            return self
        own = tuple(candidate for candidate in self.candidates if candidate.architecture.network == network_id)
        return replace(self, candidates=own, networks=MappingProxyType({network_id: self.networks[network_id]}))

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate may be assigned, as far as is known."""
        return next(self.find_obstacles(candidate), None) is None

    def why_not(self, candidate: Candidate) -> str:
        """Why a candidate may not be assigned, as a predicate such as "was refused by ..."; empty if it may."""
        return next((obstacle.why for obstacle in self.find_obstacles(candidate)), "")

    def why_never(self, candidate: Candidate) -> str:
        """The same, whatever its cost estimate."""
        return next((obstacle.why for obstacle in self._find_known_obstacles(candidate)), "")

    def find_obstacles(self, candidate: Candidate) -> Iterator[Obstacle]:
        """What keeps a candidate from the client: first what is known about it and its program, then its estimate."""
        yield from self._find_known_obstacles(candidate)
        yield from find_obstacles(candidate, self.target, self.budget)

    def _find_known_obstacles(self, candidate: Candidate) -> Iterator[Obstacle]:
        yield from self._find_refusals(candidate)
        if (written := self.written.get(candidate.architecture.architecture_id)) is not None:
            yield from find_program_obstacles(written.facts, candidate, self.target, self.budget, self.operators)

    def _find_refusals(self, candidate: Candidate) -> Iterator[Obstacle]:
        if self.below is not None and not candidate.order < self.below.order:
            why = f"is no smaller than {self.below.architecture.name!r}, which {self.below_reason}"
            yield Obstacle(limit=self.below_limit, why=why)
        if (refused := self.refused.get(candidate.architecture.architecture_id)) is not None:
            yield Obstacle(limit=refused.limit, why=f"was refused by the device: {refused.why}")

    @property
    def below_reason(self) -> str:
        """What is wrong with the size that only smaller ones may replace, as a predicate."""
        words: Mapping[Limit, str] = {
            "memory": f"needs more memory than the budget of {self.budget.memory_bytes}, according to its program",
            "disk": f"takes more disk than the budget of {self.budget.disk_bytes}, according to its program",
            "link": "takes longer to fetch than the round lasts",
            "compute": "takes longer to train than the round lasts",
            "runtime": f"cannot be run by the device's runtime {self.target!r}",
            "program": "has a program that the device could not fetch or read",
        }
        return words[self.below_limit]

    def find_exceeded(self, candidate: Candidate) -> frozenset[Limit]:
        """Every limit that keeps a candidate from the client, as far as is known; none if it may be assigned."""
        limits = frozenset(obstacle.limit for obstacle in self.find_obstacles(candidate))
        written = self.written.get(candidate.architecture.architecture_id)
        planned = written is None or written.facts.planned_peak_bytes is not None
        if not planned or self.target not in candidate.training_memory_bytes:
            limits -= {"memory"}  # no amount is enough for a size that the target cannot train
        return limits | {obstacle.limit for obstacle in self._find_refusals(candidate)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The submodel that a client gets.

    Attributes:
        candidate: None leaves the client out of the round.
        requested: the program that the client would have got if it were written; it is queued for later rounds.
        reason: why there is no candidate; empty means that the smallest does not fit.
        only: without a candidate, the one size that the client might have got.
        placed: the submodel in the model, if it depends on the client's budget; None has the method place the size.
        paths: how the device draws paths, if it gets a subspace.
    """

    candidate: Candidate | None
    requested: RequestedProgram | None = None
    reason: str = ""
    only: Candidate | None = None
    placed: Architecture | None = None
    paths: PathSettings | None = None


def assign_largest(context: AssignmentContext) -> Assignment:
    """Assign the largest candidate that fits."""
    return Assignment(candidate=next(filter(context.allows, reversed(context.candidates)), None))


def draw_size(context: AssignmentContext, sizes: Sequence[Candidate], purpose: str) -> Assignment:
    """Assign one of some sizes at random, from the client's own stream; none leaves the client out."""
    return Assignment(candidate=context.draw.stream(purpose).choice(sizes) if sizes else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearch:
    """How an assigner searches a space of submodels that is too large to list.

    Attributes:
        start: from the network, the cost estimates of its submodels and the program target, a search that knows nothing
            yet. The run adds what was found before and passes it on as `AssignmentContext.search`.
        explore: what the search finds for a client, to be remembered. It runs for all clients of a round before any is
            assigned a submodel, so that all choose from the same. It may take seconds.
    """

    start: Callable[[Network, CostEstimates, str], Search]
    explore: Callable[[AssignmentContext], tuple[FoundSize, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigner:
    """Which submodel each client gets. The default is the largest that fits, nested in the model.

    Attributes:
        space: from a network and width rates, the submodels that may be assigned.
        assign: chooses one of them for a client.
        search: finds submodels beyond `space`; None searches nothing.
        planned_estimates: memory is estimated by a model of the memory planner, not by shapes.
        propose: candidates, from smallest to largest, that a client scores on its own data. It then gets the one with
            the highest score, or what `assign` chooses if it returns no scores. Fewer than two propose nothing.
        declarations: clients have the submodels or the networks of their own that they declare. A client without a
            valid declaration is left out. `Networks.begin` and `Networks.evolve` join clients' own networks.
        lasting: clients keep the submodel that they get first. `AssignmentContext.lasting` then says what a device's
            log has most of the time.
        awaits_programs: a strict run closes a round only after the programs are written that its clients requested;
            otherwise rounds go on, and the summary of the run has the round from which each program counted.
        place: from a size, the submodel in the model that has it, for one client and round.
        exchange: the pair of maps between a client's network and the model, from the model's network, the client and
            that network's `ModelState.kept`; the same in every round. None slices the model.
    """

    space: Callable[[Network, Sequence[float]], tuple[Architecture, ...]] = uniform_space
    assign: Callable[[AssignmentContext], Assignment] = assign_largest
    search: SizeSearch | None = None
    planned_estimates: bool = False
    propose: Callable[[AssignmentContext], tuple[Candidate, ...]] | None = None
    declarations: bool = False
    lasting: bool = False
    awaits_programs: bool = True
    place: Callable[[Network, Architecture, Draw], Architecture] = lambda network, size, draw: size
    exchange: Callable[[Network, Participant, Mapping[str, Tensor]], Exchange] | None = None
