"""What a search is asked, what it answers, and the interface of every search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import fits

CostEstimates = Callable[[Architecture], Candidate]
"""The cost model: from a submodel its costs, by plain arithmetic in microseconds; a target that cannot train it is
missing in its memory. It raises `ConfigError` if the architecture is no submodel of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A device that needs a submodel.

    Attributes:
        target: the program target that it runs.
        limits: what it can give.
        refused: why it cannot have a submodel whatever that costs; empty if it can.
        below_parameters: only submodels with fewer parameters are considered.
    """

    target: str
    limits: Budget
    refused: Callable[[Candidate], str] = lambda candidate: ""
    below_parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A submodel that a device can have.

    Attributes:
        utilisation: the larger fraction of memory and links that it takes, 0 to 1.
    """

    candidate: Candidate
    utilisation: float

    @property
    def rank(self) -> tuple[int, float]:
        """Better submodels have a higher rank: more parameters, then higher utilisation."""
        return self.candidate.parameters, self.utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSize:
    """A submodel that a search remembers: an entry of its pool, for the journal.

    Attributes:
        drawn: the paper's random search drew it; else it was built towards a budget.
    """

    architecture: Architecture
    drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The result of looking for submodels for one device.

    Attributes:
        sizes: submodels to remember. All of them fit into the pool, so a full pool finds nothing.
        draws: how many submodels were drawn at random.
        hit: whether the draws ended because their limit was reached.
    """

    sizes: tuple[FoundSize, ...] = ()
    draws: int = 0
    hit: bool = False


class Search(Protocol):
    """A way to choose submodels. It is a value: each holder keeps what it knew then. All of its memory is its pool."""

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        """What it has learned, in that order."""
        ...

    def explore(self, query: Query, rng: Random) -> Explored:
        """Look for submodels for one device, without remembering. The same pool, query and stream find the same."""
        ...

    def with_estimates(self, estimate: CostEstimates) -> "Search":
        """The search with another source of the same cost estimates."""
        ...

    def learn(self, sizes: Sequence[FoundSize]) -> "Search":
        """The search that also knows these submodels; each is known once. The pool only grows."""
        ...

    def best(self, query: Query) -> Fit | None:
        """The known submodel that fits a device best, by `Fit.rank`; None if none fits.

        With the same pool, a device that can give more of anything, and no less of the rest, gets no fewer parameters.
        """
        ...


def measure_fit(candidate: Candidate, query: Query) -> Fit | None:
    """Compare a submodel with a device; None if it does not fit or is refused."""
    if query.below_parameters is not None and candidate.parameters >= query.below_parameters:
        return None
    if not fits(candidate, query.target, query.limits) or query.refused(candidate):
        return None
    taken = (
        (candidate.training_memory_bytes[query.target], query.limits.memory_bytes),
        (candidate.weight_bytes, query.limits.downlink_bytes),
        (candidate.update_bytes, query.limits.uplink_bytes),
    )
    fractions = [amount / max(limit, 1) for amount, limit in taken if limit is not None]
    return Fit(candidate=candidate, utilisation=max(fractions))
