"""The resource-constrained search of dynamic model selection.

Yao and Li, "Dynamic Model Selection", section 3.2 and algorithm 2. The pool begins with the smallest and the largest
subnet. A device gets the largest of the pool that fits; before it is taken, with probability 1 - epsilon a subnet is
drawn at random and joins the pool (the printed intersection is a misprint for a union), and so on until the draw of
epsilon ends it or the draws are more than T_max. The printed binary search cannot serve two budgets; the whole pool is
looked at instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Fraction
from subfleet.search.index import PriceIndex
from subfleet.search.query import Explored, Fit, FoundSize, PriceList, Query

__all__ = ["PaperSearch", "PaperSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PaperSettings:
    """Settings of the paper's search, with its own defaults (section 5.1.1).

    Attributes:
        epsilon: probability to take what the pool has, 0 to 1; 1 never explores.
        t_max: draws beyond which a search ends: there are at most one more, as in algorithm 2, line 17.
        pool_limit: subnets that are remembered at most; later draws serve nobody.
    """

    epsilon: Fraction = 0.8
    t_max: Count = 5
    pool_limit: Annotated[int, Range(least=2)] = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperSearch:
    """See the module.

    Attributes:
        space: to draw from.
        price: of its subnets.
        settings: of the search.
        known: the pool with the smallest and the largest subnet, and their prices.
        pool: what was learned beside the smallest and the largest subnet.
    """

    space: SearchSpace
    price: PriceList
    settings: PaperSettings
    known: PriceIndex
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def over(
        cls, space: SearchSpace, price: PriceList, targets: Sequence[str], settings: PaperSettings | None = None
    ) -> "PaperSearch":
        """A search that has learned nothing yet, for devices that may run these targets."""
        ends = (price(space.spec(genes)) for genes in (space.smallest, space.largest))
        return cls(space=space, price=price, settings=settings or PaperSettings(), known=PriceIndex(targets, ends))

    def explore(self, query: Query, rng: Random) -> Explored:
        """Draw while the stream says so; what is drawn does not depend on the budget."""
        found: list[FoundSize] = []
        draws, hit = 0, False
        while not hit and rng.random() > self.settings.epsilon:
            found.append(FoundSize(spec=self.space.spec(self.space.random(rng)), drawn=True))
            draws += 1
            hit = draws > self.settings.t_max
        new = [one for one in dict.fromkeys(found) if one.spec not in self.known]
        room = max(0, self.settings.pool_limit - len(self.known))
        return Explored(found=tuple(new[:room]), draws=draws, hit=hit)

    def priced(self, price: PriceList) -> "PaperSearch":
        """With another source of the same prices."""
        return replace(self, price=price)

    def learned(self, found: Sequence[FoundSize]) -> "PaperSearch":
        """With draws, up to the limit."""
        known, new = self.known.copied(), list[FoundSize]()
        for one in found:
            if len(known) < self.settings.pool_limit and known.add(self.price(one.spec)):
                new.append(one)
        return replace(self, known=known, pool=(*self.pool, *new))

    def best(self, query: Query) -> Fit | None:
        """The largest subnet of the pool that fits."""
        return self.known.best(query)
