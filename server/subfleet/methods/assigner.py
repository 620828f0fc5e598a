"""The assigner of a method: which submodel each client of a round is given, and where it lies in the model."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import Participant
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import Limit, Obstacle, find_obstacles, find_program_obstacles
from subfleet.search.query import CostEstimates, FoundSize, Search
from subfleet.search.queue import ProgramFacts, RequestedProgram

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.exchanges import Exchange

__all__ = [
    "Assigner",
    "Assignment",
    "AssignmentContext",
    "Draw",
    "SizeSearch",
    "WrittenSize",
    "largest_fitting",
    "stream_of",
]


def stream_of(text: str) -> random.Random:
    """The stream of random numbers that a text names."""
    return random.Random(hashlib.sha256(text.encode()).digest())  # noqa: S311 - chooses and draws, keeps no secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Where a method's choices come from: the same for the same run, round and client, whatever else happens.

    Attributes:
        memory: what the method remembers, as it stood when the round's clients were chosen.
    """

    seed: int
    round: int
    client_id: str
    memory: Any = None

    def stream(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own for each purpose."""
        return stream_of(f"{self.seed}/{self.round}/{self.client_id}/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSize:
    """A size with the program that was written for it, or could not be.

    Attributes:
        facts: of the program, with its memory as planned for the client's device.
        estimate: the estimated cost of the size, if it is known already.
    """

    size: Architecture
    facts: ProgramFacts
    estimate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentContext:
    """A client that waits for a submodel, and what is known of both.

    Attributes:
        networks: those that are in use, by id; most methods have one.
        candidates: the method's space with its costs, from smallest to largest: the sizes of all of these networks.
        estimate: the cost of any submodel of them.
        target: the program target that the device runs.
        budget: what the device can give now.
        previous: the size that it trained last; None before its first round.
        below: a candidate whose program could not be run in this round; only smaller ones may be given.
        below_limit: what kept it from the client.
        search: what the method's search knows, of the sizes that it has found so far; None where it has none.
        written: by size's id, the programs for this target that were written before this round.
        operators: that the device's runtime has; empty lists nothing, and every program is tried.
        refused: by size's id, why the device said that it cannot run the program, whatever it has to give.
        declared: the size that the device has declared, where the method goes by declarations; else None.
        lasting: what its log has but for a fraction of the time, where the method asks for that and it replays one.
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

    def of_network(self, network_id: str) -> AssignmentContext:
        """The same of one network alone."""
        if len(self.networks) == 1:
            return self
        own = tuple(one for one in self.candidates if one.architecture.network == network_id)
        return replace(self, candidates=own, networks=MappingProxyType({network_id: self.networks[network_id]}))

    def lasts(self, candidate: Candidate) -> bool:
        """Whether a candidate may be given most of the time, as far as a log tells."""
        return self.lasting is None or replace(self, budget=self.lasting).allows(candidate)

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate may be given, as far as is known."""
        return next(self.find_obstacles(candidate), None) is None

    def why_not(self, candidate: Candidate) -> str:
        """Why a candidate cannot be given, as the rest of a sentence about it; empty if it can."""
        return next((one.why for one in self.find_obstacles(candidate)), "")

    def barred(self, candidate: Candidate) -> str:
        """Why a candidate cannot be given whatever its cost estimate; empty if nothing but that may keep it."""
        return next((one.why for one in self._find_bars(candidate)), "")

    def find_obstacles(self, candidate: Candidate) -> Iterator[Obstacle]:
        """What keeps a candidate from the client: by what is known of it and its program, then by its cost estimate."""
        yield from self._find_bars(candidate)
        yield from find_obstacles(candidate, self.target, self.budget)

    def _find_bars(self, candidate: Candidate) -> Iterator[Obstacle]:
        if self.below is not None and not candidate.order < self.below.order:
            why = f"is no smaller than {self.below.architecture.name!r}, which {self.too_much}"
            yield Obstacle(limit=self.below_limit, why=why)
        architecture_id = candidate.architecture.architecture_id
        if (refused := self.refused.get(architecture_id)) is not None:
            yield Obstacle(limit=refused.limit, why=f"was refused by the device: {refused.why}")
        if (known := self.written.get(architecture_id)) is not None:
            yield from find_program_obstacles(known.facts, candidate, self.target, self.budget, self.operators)

    @property
    def too_much(self) -> str:
        """What the size below which one is looked for has, as what a sentence says of it."""
        told: Mapping[Limit, str] = {
            "memory": f"needs more memory than the budget of {self.budget.memory_bytes}, as its program says",
            "disk": f"takes more disk than the budget of {self.budget.disk_bytes}, as its program says",
            "link": "takes longer to fetch than the round lasts",
            "compute": "takes longer to train than the round lasts",
            "runtime": f"cannot be run by the device's runtime {self.target!r}",
            "program": "has a program that the device could not have or read",
        }
        return told[self.below_limit]

    def exceeded(self, candidate: Candidate) -> frozenset[Limit]:
        """Every limit that keeps a candidate from the client, as far as is known; none if it can be given."""
        limits = frozenset(one.limit for one in self.find_obstacles(candidate))
        known = self.written.get(candidate.architecture.architecture_id)
        planned = known is None or known.facts.planned_peak_bytes is not None
        # No amount of memory would be enough for what the target cannot train.
        return limits if planned and self.target in candidate.training_memory_bytes else limits - {"memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The submodel that a client is given.

    Attributes:
        candidate: None leaves it out of the round.
        wanted: what would have been given, had its program been written; it is queued for later rounds.
        reason: without a candidate, why; empty says that the smallest does not fit.
        only: without a candidate, the one size that the client might have been given.
        placed: the submodel of the model, where it depends on the client's budget; None has the method place the size.
        paths: how the device draws paths of it, where that is a subspace.
    """

    candidate: Candidate | None
    wanted: RequestedProgram | None = None
    reason: str = ""
    only: Candidate | None = None
    placed: Architecture | None = None
    paths: PathSettings | None = None


def largest_fitting(context: AssignmentContext) -> Assignment:
    """The largest candidate that fits."""
    return Assignment(candidate=next((one for one in reversed(context.candidates) if context.allows(one)), None))


def keep_in_front(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """The submodel where its size already says: at the front of every axis."""
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearch:
    """How an assigner searches a space of submodels that is too large to list.

    Attributes:
        start: a search that knows nothing yet, of the network, what its submodels cost there, and the program target.
            It is told what was found before, and is `AssignmentContext.search`.
        explore: what the search finds for a client, to be remembered. All clients of a round are explored for before
            any is given a submodel, so that all have the same to choose from. It may take seconds.
        planned_estimates: submodels are estimated by a model of the memory planner, in place of their shapes.
    """

    start: Callable[[Network, CostEstimates, str], Search]
    explore: Callable[[AssignmentContext], tuple[FoundSize, ...]]
    planned_estimates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigner:
    """Which submodel each client is given. The default is the largest that fits, nested in the model.

    Attributes:
        space: a network and width rates to the submodels that may be assigned.
        assign: chooses one of them for a client.
        search: finds submodels beyond `space`; None searches nothing.
        propose: candidates, from smallest to largest, that a client is to score on its own data; it then has the one
            with the highest score, and what `assign` chooses where it returns no scores. Fewer than two propose
            nothing; None never proposes.
        declarations: clients have the submodels that they declare, or networks of their own. A client without a valid
            declaration is left out. `Networks.begin` and `Networks.evolve` make unions of clients' own networks.
        lasting: clients keep the submodel that they get first. Devices that replay a log are asked for what it has but
            for a fraction of its time: `AssignmentContext.lasting`.
        awaits_programs: a strict run closes no round before the programs are written that its clients requested in it;
            otherwise rounds go on, and the summary of the run has the round from which each program counted.
        place: a size to the submodel that has it, for one client and round.
        exchange: where a client's network is no slice of the model, the pair of maps between the two, of the model's
            network, the client and that network's `ModelState.kept`; None slices the model. A client has the same pair
            in every round.
    """

    space: Callable[[Network, Sequence[float]], tuple[Architecture, ...]] = uniform_space
    assign: Callable[[AssignmentContext], Assignment] = largest_fitting
    search: SizeSearch | None = None
    propose: Callable[[AssignmentContext], tuple[Candidate, ...]] | None = None
    declarations: bool = False
    lasting: bool = False
    awaits_programs: bool = True
    place: Callable[[Network, Architecture, Draw], Architecture] = keep_in_front
    exchange: Callable[[Network, Participant, Mapping[str, Tensor]], Exchange] | None = None

    @property
    def planned_estimates(self) -> bool:
        """Whether submodels are estimated by a model of the memory planner."""
        return self.search is not None and self.search.planned_estimates
