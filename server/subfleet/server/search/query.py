"""What a search is asked and answers, and the seam that every search fills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.assignment import Candidate
from subfleet.server.search.limits import INFINITE_BYTES, Columns, fitting, utilisation

__all__ = ["Choice", "Fit", "Known", "PriceList", "Query", "Search", "fit_of"]


class PriceList(Protocol):
    """The seam to the cost model. It keeps what it has priced once."""

    def __call__(self, spec: SubnetSpec) -> Candidate:
        """What a subnet costs. A target that cannot train it is missing in its memory, or is infinite there.

        Raises:
            ConfigError: the spec is no subnet of the network.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One device that waits for a subnet.

    Attributes:
        target: the program target that it runs.
        limits: what it can give.
        refused: why a subnet cannot be given to it whatever it costs; empty where it can.
        below_parameters: only subnets with fewer parameters are looked at.
    """

    target: str
    limits: Budget
    refused: Callable[[Candidate], str] = lambda candidate: ""
    below_parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A subnet that a device can be given.

    Attributes:
        utilisation: the larger of its shares of memory and links, 0 to 1.
    """

    candidate: Candidate
    utilisation: float

    def rank(self, goal: float) -> tuple[float, int]:
        """Better subnets have a higher rank: utilisation counts up to the goal, beyond it parameters."""
        return min(self.utilisation, goal), self.candidate.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A subnet that a search wants to remember: an entry of its pool, for the journal.

    Attributes:
        drawn: the paper's random search drew it; else it was built towards a budget.
    """

    spec: SubnetSpec
    drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a search answers.

    Attributes:
        fit: the subnet; None leaves the device out of the round.
        found: what the search has come across and wants to remember.
        draws: how many subnets were drawn at random.
        hit: the draws ended because they were as many as are allowed.
    """

    fit: Fit | None
    found: tuple[Known, ...] = ()
    draws: int = 0
    hit: bool = False


class Search(Protocol):
    """A way to choose subnets. All that it remembers is its pool."""

    @property
    def pool(self) -> tuple[Known, ...]:
        """What was learned so far, in that order."""
        ...

    def choose(self, query: Query, rng: Random) -> Choice:
        """Choose for one device. Nothing is remembered; the same pool, query and stream give the same answer."""
        ...

    def learn(self, found: Sequence[Known]) -> None:
        """Remember, what is known already once. The pool only grows."""
        ...


def fit_of(candidate: Candidate, query: Query) -> Fit | None:
    """A subnet held against one device; None where it does not fit or is refused."""
    if query.below_parameters is not None and candidate.parameters >= query.below_parameters:
        return None
    memory_bytes = min(candidate.training_memory_bytes.get(query.target, INFINITE_BYTES), INFINITE_BYTES)
    columns = Columns(
        parameters=np.array([candidate.parameters]),
        weight_bytes=np.array([candidate.weight_bytes]),
        update_bytes=np.array([candidate.update_bytes]),
        forward_macs=np.array([candidate.forward_macs]),
        memory_bytes=np.array([memory_bytes]),
    )
    if not fitting(columns, query.limits)[0] or query.refused(candidate):
        return None
    return Fit(candidate=candidate, utilisation=float(utilisation(columns, query.limits)[0]))
