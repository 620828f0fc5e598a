"""The resource-constrained search of dynamic model selection.

Yao and Li, "Dynamic Model Selection", section 3.2 and algorithm 2. The pool begins with the smallest and the largest
subnet. A device gets the largest of the pool that fits; before it is taken, with probability 1 - epsilon a subnet is
drawn at random and joins the pool (the printed intersection is a misprint for a union), and so on until the draw of
epsilon ends it or the draws are more than T_max. The printed binary search cannot serve two budgets; the whole pool is
looked at instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.errors import ConfigError
from subfleet.search.index import PriceIndex
from subfleet.search.query import Explored, Fit, Known, PriceList, Query

__all__ = ["PaperSearch", "PaperSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSettings:
    """Settings of the paper's search, with its own defaults (section 5.1.1).

    Attributes:
        epsilon: probability to take what the pool has, 0 to 1; 1 never explores.
        t_max: draws beyond which a search ends: there are at most one more, as in algorithm 2, line 17.
        pool_limit: subnets that are remembered at most; later draws serve nobody.
    """

    epsilon: float = 0.8
    t_max: int = 5
    pool_limit: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ConfigError(f"epsilon is {self.epsilon}, but must be from 0 to 1")
        if self.t_max < 0 or self.pool_limit < 2:
            raise ConfigError(
                f"t_max is {self.t_max} and pool_limit {self.pool_limit}, but must be 0 or more and 2 or more"
            )


class PaperSearch:
    """See the module.

    Args:
        space: to draw from.
        price: of its subnets.
        targets: program targets that devices may run.
        settings: of the search.
    """

    def __init__(
        self, space: SearchSpace, price: PriceList, targets: Sequence[str], settings: PaperSettings | None = None
    ) -> None:
        self._space, self._price = space, price
        self._settings = settings or PaperSettings()
        self._index = PriceIndex(targets, (price(space.spec(genes)) for genes in (space.smallest, space.largest)))
        self._pool: list[Known] = []

    @property
    def pool(self) -> tuple[Known, ...]:
        """What was learned beside the smallest and the largest subnet."""
        return tuple(self._pool)

    @property
    def known(self) -> PriceIndex:
        """The pool with the smallest and the largest subnet, and their prices."""
        return self._index

    def explore(self, query: Query, rng: Random) -> Explored:
        """Draw while the stream says so; what is drawn does not depend on the budget."""
        found: list[Known] = []
        draws, hit = 0, False
        while not hit and rng.random() > self._settings.epsilon:
            found.append(Known(spec=self._space.spec(self._space.random(rng)), drawn=True))
            draws += 1
            hit = draws > self._settings.t_max
        new = [one for one in dict.fromkeys(found) if one.spec not in self._index]
        room = max(0, self._settings.pool_limit - len(self._index))
        return Explored(found=tuple(new[:room]), draws=draws, hit=hit)

    def learn(self, found: Sequence[Known]) -> None:
        """Remember draws, up to the limit."""
        for one in found:
            if len(self._index) < self._settings.pool_limit and self._index.add(self._price(one.spec)):
                self._pool.append(one)

    def best(self, query: Query) -> Fit | None:
        """The largest subnet of the pool that fits."""
        return self._index.best(query)
