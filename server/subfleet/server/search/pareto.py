"""Our search: the paper's, and from its answer on an index of all known subnets and a climb towards the budget.

Utilisation counts up to a goal, 0.98 of a budget; among subnets that reach it the one with the most parameters is
given, which is the paper's objective. Parameters cost at most the 0.02 above the goal, and no answer uses less than
the paper's search with the same draws does, nor less than the best subnet of a uniform space: both are known before
ours begins, and their utilisation is its floor. Where nothing reaches the goal, utilisation alone decides.

While the pool has room, it grows by subnets of all sizes, and the neighbourhood of the best known one is climbed with
probability 1 - epsilon; what fits on the way joins the pool and serves every later device with a similar budget. Once
it is full, only answers below the goal are climbed for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.search.climbing import Climb
from subfleet.server.search.index import PriceIndex
from subfleet.server.search.paper import PaperSearch, PaperSettings
from subfleet.server.search.query import Choice, Fit, Known, PriceList, Query

__all__ = ["ParetoSearch", "ParetoSettings"]

_PRICES = 16_384
"""Prices that are kept beside the pool: neighbours of subnets that are given often are asked for again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoSettings:
    """Settings of our search.

    Attributes:
        paper: of the search that ours begins with. An epsilon of 1 switches off all exploring, ours too.
        goal: utilisation beyond which parameters count, 0 to 1.
        trials: subnets that one climb prices.
        samples: subnets of any size that join the pool with each choice, until it is half full.
        built_limit: subnets in the pool beyond which it grows by the paper's draws alone, as far as those go.
    """

    paper: PaperSettings = field(default_factory=PaperSettings)
    goal: float = 0.98
    trials: int = 64
    samples: int = 16
    built_limit: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.goal <= 1:
            raise ConfigError(f"goal is {self.goal}, but must be from 0 to 1")
        for name in ("trials", "samples", "built_limit"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be 0 or more")


class ParetoSearch:
    """See the module.

    Args:
        space: to choose from.
        price: of its subnets.
        targets: program targets that devices may run.
        uniform: subnets of one width rate, whose best is a floor; they need not be in the space.
        settings: of the search.
    """

    def __init__(
        self,
        space: SearchSpace,
        price: PriceList,
        targets: Sequence[str],
        *,
        uniform: Sequence[SubnetSpec] = (),
        settings: ParetoSettings | None = None,
    ) -> None:
        self._settings = settings or ParetoSettings()
        self._space, self._targets = space, tuple(targets)
        self._price = lru_cache(maxsize=_PRICES)(price)
        self._paper = PaperSearch(space, self._price, targets, self._settings.paper)
        self._uniform = PriceIndex(targets, map(price, uniform))
        self._index = PriceIndex(targets, (*self._paper.known, *self._uniform))
        self._most_parameters = price(space.spec(space.largest)).parameters
        self._pool: list[Known] = []
        self._climb = Climb(space=space, price=self._price, trials=self._settings.trials)

    @property
    def pool(self) -> tuple[Known, ...]:
        """What was learned beside the smallest, the largest and the uniform subnets."""
        return tuple(self._pool)

    @property
    def known(self) -> PriceIndex:
        """Every subnet that is known, with its price."""
        return self._index

    def choose(self, query: Query, rng: Random) -> Choice:
        """The best of what is known, drawn and reached by a climb."""
        paper = self._paper.choose(query, rng)
        uniform = self._uniform.best(query, goal=1.0)
        floor = max((fit.utilisation for fit in (paper.fit, uniform) if fit is not None), default=0.0)
        goal = self._settings.goal
        found = (*paper.found, *self._spread(rng))
        drawn = PriceIndex(self._targets, (self._price(one.spec) for one in found))
        best = _best((index.best(query, goal=goal, floor=floor) for index in (self._index, drawn)), goal)
        if best is not None and paper.fit is not None and self._explores(best, rng):
            start = best if self._space.holds(best.candidate.spec) else paper.fit
            reached = self._climb.reached(start, query, goal=goal, rng=rng)
            specs = dict.fromkeys(fit.candidate.spec for fit in reached)
            found += tuple(Known(spec=spec, drawn=False) for spec in specs if spec not in self._index)
            best = _best((best, *(fit for fit in reached if fit.utilisation >= floor)), goal)
        return Choice(fit=best, found=found, draws=paper.draws, hit=paper.hit)

    def learn(self, found: Sequence[Known]) -> None:
        """Remember draws as far as the paper's search does, and what was built while it is below its own limit."""
        for one in found:
            before = len(self._paper.pool), len(self._index)
            if one.drawn:
                self._paper.learn([one])
            room = one.spec in self._paper.known if one.drawn else len(self._pool) < self._settings.built_limit
            if room:
                self._index.add(self._price(one.spec))
            if before != (len(self._paper.pool), len(self._index)):
                self._pool.append(one)

    def _spread(self, rng: Random) -> tuple[Known, ...]:
        if self._settings.paper.epsilon >= 1 or len(self._pool) >= self._settings.built_limit // 2:
            return ()
        every = (self._space.spec(self._space.spread(rng)) for _ in range(self._settings.samples))
        return tuple(Known(spec=spec, drawn=False) for spec in every if spec not in self._index)

    def _explores(self, best: Fit, rng: Random) -> bool:
        epsilon = self._settings.paper.epsilon
        if epsilon >= 1 or best.candidate.parameters == self._most_parameters:
            return False
        if best.utilisation < self._settings.goal:
            return True
        return len(self._pool) < self._settings.built_limit and rng.random() > epsilon


def _best(fits: Iterable[Fit | None], goal: float) -> Fit | None:
    return max((fit for fit in fits if fit is not None), key=lambda fit: fit.rank(goal), default=None)
