"""Our search: the paper's, and from its answer on an index of all known subnets and a climb towards the budget.

Utilisation counts up to a goal, 0.99 of a budget; among subnets that reach it the one with the most parameters is
given, which is the paper's objective. No answer uses less than the paper's search with the same draws, nor less than
the best width of a uniform space: both are known before ours begins, and their utilisation is its floor.

Wherever the best known subnet is below the goal, and with probability 1 - epsilon elsewhere, its neighbourhood is
climbed; what is reached joins the pool and serves every later device with a similar budget. So the pool becomes dense
where budgets are, and once it is, an answer takes a few passes over columns of numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.assignment import Candidate
from subfleet.server.search.climbing import Aim, Climb, rank
from subfleet.server.search.index import PriceIndex
from subfleet.server.search.paper import PaperSearch, PaperSettings
from subfleet.server.search.query import Choice, Known, PriceList, Query, share_of

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
        built_limit: subnets that were reached by climbs and are remembered, at most; draws are remembered beside them
            as far as the paper's search does.
    """

    paper: PaperSettings = field(default_factory=PaperSettings)
    goal: float = 0.99
    trials: int = 48
    samples: int = 16
    built_limit: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.goal <= 1:
            raise ConfigError(f"goal is {self.goal}, but must be from 0 to 1")
        if self.trials < 0 or self.built_limit < 0:
            raise ConfigError(f"trials is {self.trials} and built_limit {self.built_limit}, but must be 0 or more")


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
        self._space, self._price, self._targets = space, price, tuple(targets)
        self._paper = PaperSearch(space, price, targets, self._settings.paper)
        self._uniform = PriceIndex(targets, map(price, uniform))
        self._index = PriceIndex(targets, (*self._paper.known, *self._uniform))
        self._whole_id = space.spec(space.largest).spec_id
        self._pool: list[Known] = []
        self._built = 0
        self._climb = Climb(
            space=space,
            price=lru_cache(maxsize=_PRICES)(lambda genes: price(space.spec(genes))),
            trials=self._settings.trials,
        )

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
        floor = max(paper.utilisation, _share(uniform, query))
        aim = Aim(query=query, goal=self._settings.goal, floor=floor)
        found = (*paper.found, *self._spread(rng))
        drawn = PriceIndex(self._targets, (self._price(one.spec) for one in found))
        known = [index.best(query, goal=aim.goal, floor=floor) for index in (self._index, drawn)]
        best = _best((one for one in known if one is not None), aim)
        if best is None or paper.candidate is None:
            return Choice(candidate=best, utilisation=_share(best, query), found=found, draws=paper.draws)
        if self._explores(_share(best, query), best, rng):
            start = best if self._space.holds(best.spec) else paper.candidate
            reached = PriceIndex(self._targets, self._climb.reached(start, aim, rng))
            fresh = [one.spec for one in reached if one.spec.spec_id not in self._index]
            found = (*found, *(Known(spec=spec, drawn=False) for spec in fresh))
            best = _best((best, *reached), aim) or best
        return Choice(candidate=best, utilisation=_share(best, query), found=found, draws=paper.draws, hit=paper.hit)

    def learn(self, found: Sequence[Known]) -> None:
        """Remember draws as far as the paper's search does, and what was built while it is below its own limit."""
        for one in found:
            before = len(self._paper.pool), len(self._index)
            if one.drawn:
                self._paper.learn([one])
            room = one.spec.spec_id in self._paper.known if one.drawn else len(self._pool) < self._settings.built_limit
            if room:
                self._index.add(self._price(one.spec))
            if before != (len(self._paper.pool), len(self._index)):
                self._pool.append(one)
                self._built += not one.drawn

    def _spread(self, rng: Random) -> tuple[Known, ...]:
        if self._settings.paper.epsilon >= 1 or len(self._pool) >= self._settings.built_limit // 4:
            return ()
        every = (self._space.spec(self._space.spread(rng)) for _ in range(self._settings.samples))
        return tuple(Known(spec=spec, drawn=False) for spec in every if spec.spec_id not in self._index)

    def _explores(self, share: float, best: Candidate, rng: Random) -> bool:
        epsilon = self._settings.paper.epsilon
        if epsilon >= 1 or len(self._pool) >= self._settings.built_limit or best.spec.spec_id == self._whole_id:
            return False
        return share < self._settings.goal or rng.random() > epsilon


def _share(candidate: Candidate | None, query: Query) -> float:
    return (share_of(candidate, query) or 0.0) if candidate is not None else 0.0


def _best(candidates: Iterable[Candidate], aim: Aim) -> Candidate | None:
    return max(candidates, key=lambda one: (rank(one, aim) or (0.0, 0), one.order), default=None)
