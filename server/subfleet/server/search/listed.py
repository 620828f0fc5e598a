"""The best subnet of a space that is small enough to be listed: what other searches are held against."""

from collections.abc import Sequence
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.search.index import PriceIndex
from subfleet.server.search.query import Choice, Known, PriceList, Query

__all__ = ["ListedSearch", "exhaustive_search"]


class ListedSearch:
    """The best of a fixed list.

    Args:
        specs: the list.
        price: of its subnets.
        targets: program targets that devices may run.
        goal: utilisation counts up to here, then parameters: 0 gives the largest subnet that fits, as HeteroFL does;
            1 gives the highest utilisation.
    """

    def __init__(
        self, specs: Sequence[SubnetSpec], price: PriceList, targets: Sequence[str], *, goal: float = 0.0
    ) -> None:
        self._index = PriceIndex(targets, map(price, specs))
        self._goal = goal

    @property
    def pool(self) -> tuple[Known, ...]:
        """Nothing is learned."""
        return ()

    @property
    def known(self) -> PriceIndex:
        """The list with its prices."""
        return self._index

    def choose(self, query: Query, rng: Random) -> Choice:
        """The best that fits; the stream is not used."""
        return Choice(fit=self._index.best(query, goal=self._goal))

    def learn(self, found: Sequence[Known]) -> None:
        """Nothing: the list is fixed."""


def exhaustive_search(
    space: SearchSpace, price: PriceList, targets: Sequence[str], *, goal: float, limit: int = 200_000
) -> ListedSearch:
    """The optimum of a whole space.

    Raises:
        ConfigError: the space has more than `limit` combinations.
    """
    return ListedSearch([space.spec(genes) for genes in space.enumerate(limit)], price, targets, goal=goal)
