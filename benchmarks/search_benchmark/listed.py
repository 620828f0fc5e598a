"""The best submodel of a space that is small enough to be listed: the reference for other searches."""

from collections.abc import Sequence
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.submodel import Architecture
from subfleet.search.query import CostEstimates, EstimateIndex, Fit, FoundSize, Query

__all__ = ["ListedSearch", "list_space"]


class ListedSearch:
    """A search among a fixed list of submodels.

    Args:
        architectures: the list.
        estimate: the cost estimates of its submodels.
        target: program target of the devices.
    """

    pool: tuple[FoundSize, ...] = ()

    def __init__(self, architectures: Sequence[Architecture], estimate: CostEstimates, target: str) -> None:
        self.known = EstimateIndex(target, map(estimate, architectures))

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        """Find nothing: the list is complete."""
        return ()

    def with_estimates(self, estimate: CostEstimates) -> "ListedSearch":
        """Return the same search, which already has its cost estimates."""
        return self

    def learn(self, sizes: Sequence[FoundSize]) -> "ListedSearch":
        """Return the same search: the list is fixed."""
        return self

    def best(self, query: Query) -> Fit | None:
        """The submodel with the most parameters that fits."""
        return self.known.best(query)


def list_space(space: SearchSpace, estimate: CostEstimates, target: str, *, limit: int = 200_000) -> ListedSearch:
    """The search among all submodels of a space.

    Raises:
        ConfigError: the space has more than `limit` combinations.
    """
    return ListedSearch([space.architecture(genes) for genes in space.enumerate(limit)], estimate, target)
