"""The best subnet of a space that is small enough to be listed: what other searches are held against."""

from collections.abc import Sequence
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.subnet import SubnetSpec
from subfleet.search.index import PriceIndex
from subfleet.search.query import Explored, Fit, FoundSize, PriceList, Query

__all__ = ["ListedSearch", "exhaustive_search"]


class ListedSearch:
    """The best of a fixed list.

    Args:
        specs: the list.
        price: of its subnets.
        targets: program targets that devices may run.
    """

    def __init__(self, specs: Sequence[SubnetSpec], price: PriceList, targets: Sequence[str]) -> None:
        self._index = PriceIndex(targets, map(price, specs))

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        """Nothing is learned."""
        return ()

    @property
    def known(self) -> PriceIndex:
        """The list with its prices."""
        return self._index

    def explore(self, query: Query, rng: Random) -> Explored:
        """Nothing: all is known."""
        return Explored()

    def priced(self, price: PriceList) -> "ListedSearch":
        """This one: the list has its prices."""
        return self

    def learned(self, found: Sequence[FoundSize]) -> "ListedSearch":
        """This one: the list is fixed."""
        return self

    def best(self, query: Query) -> Fit | None:
        """The one with the most parameters that fits."""
        return self._index.best(query)


def exhaustive_search(
    space: SearchSpace, price: PriceList, targets: Sequence[str], *, limit: int = 200_000
) -> ListedSearch:
    """The optimum of a whole space.

    Raises:
        ConfigError: the space has more than `limit` combinations.
    """
    return ListedSearch([space.spec(genes) for genes in space.enumerate(limit)], price, targets)
