"""The resource-constrained search of dynamic model selection.

Yao and Li, "Dynamic Model Selection", section 3.2 and algorithm 2. The pool begins with the smallest and the largest
submodel. A device gets the largest submodel of the pool that fits. Before that, with probability 1 - epsilon a random
submodel joins the pool (the printed intersection is a misprint for a union), again and again until epsilon ends it or
there are more than T_max draws. The printed binary search cannot serve two budgets, so the whole pool is searched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.search.query import CostEstimates, EstimateIndex, Fit, FoundSize, Query


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSettings:
    """Settings of the paper's search, with its defaults (section 5.1.1).

    Attributes:
        epsilon: probability to take the best of the pool, 0 to 1; 1 never explores.
        t_max: a search ends after more draws than this, 0 or more, as in algorithm 2, line 17.
        pool_limit: the most submodels in the pool, 2 or more; further draws are discarded.
    """

    epsilon: float = 0.8
    t_max: int = 5
    pool_limit: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperSearch:
    """The paper's search, as a value.

    Attributes:
        space: the submodels to draw from.
        estimate: the cost estimates of its submodels.
        settings: of the search.
        known: the pool with the smallest and the largest submodel, and their cost estimates.
        pool: what was learned in addition to these two.
    """

    space: SearchSpace
    estimate: CostEstimates
    settings: PaperSettings
    known: EstimateIndex
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def over(cls, space: SearchSpace, estimate: CostEstimates, target: str, settings: PaperSettings) -> "PaperSearch":
        """A search that has learned nothing yet, for devices with this target."""
        ends = (estimate(space.architecture(genes)) for genes in (space.smallest, space.largest))
        return cls(space=space, estimate=estimate, settings=settings, known=EstimateIndex(target, ends))

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        """Draw submodels until the stream ends it; the draws do not depend on the budget."""
        sizes: list[FoundSize] = []
        while len(sizes) <= self.settings.t_max and rng.random() > self.settings.epsilon:
            sizes.append(FoundSize(architecture=self.space.architecture(self.space.random(rng)), drawn=True))
        new = [size for size in dict.fromkeys(sizes) if size.architecture not in self.known]
        room = max(0, self.settings.pool_limit - len(self.known))
        return tuple(new[:room])

    def with_estimates(self, estimate: CostEstimates) -> "PaperSearch":
        """The search with another source of the same cost estimates."""
        return replace(self, estimate=estimate)

    def learn(self, sizes: Sequence[FoundSize]) -> "PaperSearch":
        """The search that also knows these draws, up to the limit of its pool."""
        known, new = self.known.copy(), list[FoundSize]()
        for size in sizes:
            if len(known) < self.settings.pool_limit and known.add(self.estimate(size.architecture)):
                new.append(size)
        return replace(self, known=known, pool=(*self.pool, *new))

    def best(self, query: Query) -> Fit | None:
        """The largest submodel of the pool that fits."""
        return self.known.best(query)
