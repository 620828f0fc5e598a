"""The resource-constrained search of dynamic model selection.

Yao and Li, "Dynamic Model Selection", section 3.2 and algorithm 2. The pool begins with the smallest and the largest
submodel. A device gets the largest of the pool that fits; before it is taken, with probability 1 - epsilon a submodel
is drawn at random and joins the pool (the printed intersection is a misprint for a union), and so on until the draw of
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
from subfleet.search.index import EstimateIndex
from subfleet.search.query import CostEstimates, Explored, Fit, FoundSize, Query

__all__ = ["PaperSearch", "PaperSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PaperSettings:
    """Settings of the paper's search, with its own defaults (section 5.1.1).

    Attributes:
        epsilon: probability to take what the pool has, 0 to 1; 1 never explores.
        t_max: draws beyond which a search ends: there are at most one more, as in algorithm 2, line 17.
        pool_limit: submodels that are remembered at most; later draws serve nobody.
    """

    epsilon: Fraction = 0.8
    t_max: Count = 5
    pool_limit: Annotated[int, Range(least=2)] = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperSearch:
    """See the module.

    Attributes:
        space: to draw from.
        estimate: of its submodels.
        settings: of the search.
        known: the pool with the smallest and the largest submodel, and their cost estimates.
        pool: what was learned beside the smallest and the largest submodel.
    """

    space: SearchSpace
    estimate: CostEstimates
    settings: PaperSettings
    known: EstimateIndex
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def over(
        cls, space: SearchSpace, estimate: CostEstimates, targets: Sequence[str], settings: PaperSettings | None = None
    ) -> "PaperSearch":
        """A search that has learned nothing yet, for devices that may run these targets."""
        ends = (estimate(space.architecture(genes)) for genes in (space.smallest, space.largest))
        return cls(
            space=space, estimate=estimate, settings=settings or PaperSettings(), known=EstimateIndex(targets, ends)
        )

    def explore(self, query: Query, rng: Random) -> Explored:
        """Draw while the stream says so; what is drawn does not depend on the budget."""
        found: list[FoundSize] = []
        draws, hit = 0, False
        while not hit and rng.random() > self.settings.epsilon:
            found.append(FoundSize(architecture=self.space.architecture(self.space.random(rng)), drawn=True))
            draws += 1
            hit = draws > self.settings.t_max
        new = [one for one in dict.fromkeys(found) if one.architecture not in self.known]
        room = max(0, self.settings.pool_limit - len(self.known))
        return Explored(found=tuple(new[:room]), draws=draws, hit=hit)

    def estimated(self, estimate: CostEstimates) -> "PaperSearch":
        """With another source of the same cost estimates."""
        return replace(self, estimate=estimate)

    def learned(self, found: Sequence[FoundSize]) -> "PaperSearch":
        """With draws, up to the limit."""
        known, new = self.known.copied(), list[FoundSize]()
        for one in found:
            if len(known) < self.settings.pool_limit and known.add(self.estimate(one.architecture)):
                new.append(one)
        return replace(self, known=known, pool=(*self.pool, *new))

    def best(self, query: Query) -> Fit | None:
        """The largest submodel of the pool that fits."""
        return self.known.best(query)
