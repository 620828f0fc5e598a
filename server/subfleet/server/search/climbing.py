"""Better subnets in the neighbourhood of a good one, for one budget."""

from dataclasses import dataclass
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.server.search.query import Fit, PriceList, Query, fit_of

__all__ = ["Climb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """Tries changes of one gene or an exchange between two, and keeps every change for the better.

    A budget is filled by making genes larger; where no gene can grow any more, one grows at another's expense. Steps
    are of all sizes, so that genes of many options are crossed as fast as those of few.

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
        best, genes = start, self.space.genes_of(start.candidate.spec)
        fitting = []
        for _ in range(self.trials):
            changed = self._changed(genes, rng)
            fit = fit_of(self.price(self.space.spec(changed)), query)
            if fit is not None:
                fitting.append(fit)
                if fit.rank(goal) > best.rank(goal):
                    best, genes = fit, changed
        return fitting

    def _changed(self, genes: Genes, rng: Random) -> Genes:
        largest = self.space.largest
        grown = [place for place, (own, most) in enumerate(zip(genes, largest, strict=True)) if own < most]
        changed = list(genes)
        if grown:
            place = rng.choice(grown)
            changed[place] += _step(largest[place] - genes[place], rng)
        else:
            place = -1
        shrunk = [other for other, own in enumerate(genes) if own > 0 and other != place]
        if shrunk and (not grown or rng.random() < 0.5):
            place = rng.choice(shrunk)
            changed[place] -= _step(genes[place], rng)
        return tuple(changed)


def _step(room: int, rng: Random) -> int:
    """1 or more, at most `room`: any power of two of its fractions alike."""
    return max(1, room >> rng.randrange(room.bit_length()))
