"""What a search is asked and answers, and the seam that every search fills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import fits
from subfleet.search.limits import columns_of, utilisation

__all__ = ["CostEstimates", "Explored", "Fit", "FoundSize", "Query", "Search", "fit_of"]


class CostEstimates(Protocol):
    """The seam to the cost model: arithmetic alone, microseconds for a submodel."""

    def __call__(self, architecture: Architecture) -> Candidate:
        """What a submodel costs. A target that cannot train it is missing in its memory.

        Raises:
            ConfigError: the architecture is no submodel of the network.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One device that waits for a submodel.

    Attributes:
        target: the program target that it runs.
        limits: what it can give.
        refused: why a submodel cannot be given to it whatever it costs; empty where it can.
        below_parameters: only submodels with fewer parameters are looked at.
    """

    target: str
    limits: Budget
    refused: Callable[[Candidate], str] = lambda candidate: ""
    below_parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A submodel that a device can be given.

    Attributes:
        utilisation: the larger of its shares of memory and links, 0 to 1.
    """

    candidate: Candidate
    utilisation: float

    @property
    def rank(self) -> tuple[int, float]:
        """Better submodels have a higher rank: parameters count first, then utilisation."""
        return self.candidate.parameters, self.utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSize:
    """A submodel that a search wants to remember: an entry of its pool, for the journal.

    Attributes:
        drawn: the paper's random search drew it; else it was built towards a budget.
    """

    architecture: Architecture
    drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search came by when it looked for submodels for one device.

    Attributes:
        found: what it wants to remember: all of it joins the pool, so that a full pool leaves nothing to find.
        draws: how many submodels were drawn at random.
        hit: the draws ended because they were as many as are allowed.
    """

    found: tuple[FoundSize, ...] = ()
    draws: int = 0
    hit: bool = False


class Search(Protocol):
    """A way to choose submodels: a value. Nothing changes it, so whoever holds one has what it knew then.

    All that it remembers is its pool.
    """

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        """What was learned so far, in that order."""
        ...

    def explore(self, query: Query, rng: Random) -> Explored:
        """Look for submodels for one device. Nothing is remembered; the same pool, query and stream find the same."""
        ...

    def estimated(self, estimate: CostEstimates) -> "Search":
        """The search with another source of the same cost estimates."""
        ...

    def learned(self, found: Sequence[FoundSize]) -> "Search":
        """The search that knows these too, what is known already once. The pool only grows."""
        ...

    def best(self, query: Query) -> Fit | None:
        """The known submodel that fits a device best, by `Fit.rank`; None leaves it out of the round.

        With the same pool, a device that can give more of anything, and no less of the rest, gets no fewer parameters.
        """
        ...


def fit_of(candidate: Candidate, query: Query) -> Fit | None:
    """A submodel held against one device; None where it does not fit or is refused."""
    if query.below_parameters is not None and candidate.parameters >= query.below_parameters:
        return None
    if not fits(candidate, query.target, query.limits) or query.refused(candidate):
        return None
    used = utilisation(columns_of(candidate, query.target), query.limits)
    return Fit(candidate=candidate, utilisation=float(used[0]))
