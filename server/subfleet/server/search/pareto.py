"""Our search: the paper's, and from its answer on an index of all known subnets and a climb towards the budget.

Utilisation counts up to a goal, 0.99 of a budget; among subnets that reach it the one with the most parameters is
given, which is the paper's objective. No answer uses less than the paper's search with the same draws, nor less than
the best width of a uniform space: both are known before ours begins, and their utilisation is its floor.

Wherever the best known subnet is below the goal, and with probability 1 - epsilon elsewhere, its neighbourhood is
climbed; what is reached joins the pool and serves every later device with a similar budget. So the pool becomes dense
where budgets are, and once it is, an answer takes a few passes over columns of numbers.
"""

from collections.abc import Sequence
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
        built_limit: subnets in the whole pool beyond which climbs are no longer remembered. Draws join it until there
            are as many more as the paper's own pool may have.
    """

    paper: PaperSettings = field(default_factory=PaperSettings)
    goal: float = 0.99
    trials: int = 48
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
        self._pool: list[Known] = []
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
        floor = max(paper.utilisation, (share_of(uniform, query) or 0.0) if uniform is not None else 0.0)
        aim = Aim(query=query, goal=self._settings.goal, floor=floor)
        drawn = PriceIndex(self._targets, (self._price(one.spec) for one in paper.found))
        best = _better(
            self._index.best(query, goal=aim.goal, floor=floor), drawn.best(query, goal=aim.goal, floor=floor), aim
        )
        if best is None:
            return paper
        found = [one for one in paper.found if one.spec.spec_id not in self._index]
        climbed = self._climbed(best, aim, rng)
        if climbed is not best and climbed.spec.spec_id not in self._index:
            found.append(Known(spec=climbed.spec, drawn=False))
        share = share_of(climbed, query) or 0.0
        return Choice(candidate=climbed, utilisation=share, found=tuple(found), draws=paper.draws, hit=paper.hit)

    def learn(self, found: Sequence[Known]) -> None:
        """Remember draws, and what was built while the pool is below its limit."""
        self._paper.learn([one for one in found if one.drawn])
        most_drawn = self._settings.built_limit + self._settings.paper.pool_limit
        for one in found:
            limit = most_drawn if one.drawn else self._settings.built_limit
            if len(self._pool) < limit and self._index.add(self._price(one.spec)):
                self._pool.append(one)

    def _climbed(self, best: Candidate, aim: Aim, rng: Random) -> Candidate:
        epsilon = self._settings.paper.epsilon
        whole = best.spec.spec_id == self._space.spec(self._space.largest).spec_id
        if epsilon >= 1 or whole:
            return best
        share = share_of(best, aim.query) or 0.0
        if share >= aim.goal and rng.random() <= epsilon:
            return best
        try:
            return self._climb.better(best, aim, rng)
        except ConfigError:  # a uniform subnet that the space lacks has no neighbours there
            return best


def _better(left: Candidate | None, right: Candidate | None, aim: Aim) -> Candidate | None:
    if left is None or right is None:
        return left or right
    return max(left, right, key=lambda one: (rank(one, aim) or (0.0, 0), one.order))
