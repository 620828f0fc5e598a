"""Better subnets in the neighbourhood of a good one, for one budget."""

from dataclasses import dataclass
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.server.search.query import Fit, PriceList, Query, fit_of

__all__ = ["Climb"]

_MOST_CHANGED = 4
_MOST_IDLE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """Changes a few genes at a time, some up and some down, and goes on from every change for the better.

    A budget is filled by genes that grow; where none can grow any more, some grow at the expense of others. Steps are
    of all sizes, so that genes of many options are crossed as fast as those of few.

    Attributes:
        space: of the genes.
        price: of its subnets.
        trials: subnets that are priced.
    """

    space: SearchSpace
    price: PriceList
    trials: int

    def reached(self, start: Fit, query: Query, *, goal: float, rng: Random) -> list[Fit]:
        """Subnets that fit, in the order in which they were tried from `start` on."""
        best, genes, idle = start, self.space.genes_of(start.candidate.spec), 0
        fitting = []
        for _ in range(self.trials):
            changed = self._changed(genes, rng)
            fit, idle = fit_of(self.price(self.space.spec(changed)), query), idle + 1
            if fit is None:
                continue
            fitting.append(fit)
            # A climb that gets nowhere goes on from somewhere else that fits.
            if fit.rank(goal) > best.rank(goal) or idle > _MOST_IDLE:
                best, genes, idle = fit, changed, 0
        return fitting

    def _changed(self, genes: Genes, rng: Random) -> Genes:
        changed, order = list(genes), list(range(len(genes)))
        rng.shuffle(order)
        for place, way in zip(order, rng.choices((1, -1), k=rng.randint(1, _MOST_CHANGED)), strict=False):
            room = self.space.largest[place] - genes[place] if way > 0 else genes[place]
            if room:
                changed[place] += way * _step(room, rng)
        return tuple(changed)


def _step(room: int, rng: Random) -> int:
    """1 or more, at most `room`: any power of two of its fractions alike."""
    return max(1, room >> rng.randrange(room.bit_length()))
