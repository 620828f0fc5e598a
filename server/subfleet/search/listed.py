"""The best submodel of a space that is small enough to be listed: what other searches are held against."""

from collections.abc import Sequence
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.submodel import Architecture
from subfleet.search.index import EstimateIndex
from subfleet.search.query import CostEstimates, Explored, Fit, FoundSize, Query

__all__ = ["ListedSearch", "exhaustive_search"]


class ListedSearch:
    """The best of a fixed list.

    Args:
        architectures: the list.
        estimate: of its submodels.
        targets: program targets that devices may run.
    """

    def __init__(self, architectures: Sequence[Architecture], estimate: CostEstimates, targets: Sequence[str]) -> None:
        self._index = EstimateIndex(targets, map(estimate, architectures))

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        """Nothing is learned."""
        return ()

    @property
    def known(self) -> EstimateIndex:
        """The list with its cost estimates."""
        return self._index

    def explore(self, query: Query, rng: Random) -> Explored:
        """Nothing: all is known."""
        return Explored()

    def estimated(self, estimate: CostEstimates) -> "ListedSearch":
        """This one: the list has its cost estimates."""
        return self

    def learned(self, found: Sequence[FoundSize]) -> "ListedSearch":
        """This one: the list is fixed."""
        return self

    def best(self, query: Query) -> Fit | None:
        """The one with the most parameters that fits."""
        return self._index.best(query)


def exhaustive_search(
    space: SearchSpace, estimate: CostEstimates, targets: Sequence[str], *, limit: int = 200_000
) -> ListedSearch:
    """The optimum of a whole space.

    Raises:
        ConfigError: the space has more than `limit` combinations.
    """
    return ListedSearch([space.architecture(genes) for genes in space.enumerate(limit)], estimate, targets)
