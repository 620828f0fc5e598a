"""Better subnets in the neighbourhood of a good one, for one budget."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.server.assignment import Candidate
from subfleet.server.search.query import Query, share_of

__all__ = ["Aim", "Climb", "rank"]

Rank = tuple[float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What counts as better for one device.

    Attributes:
        goal: utilisation counts up to here, beyond it parameters.
        floor: least utilisation.
    """

    query: Query
    goal: float
    floor: float


def rank(candidate: Candidate, aim: Aim) -> Rank | None:
    """Better subnets have a higher rank; None where it does not fit or is below the floor."""
    share = share_of(candidate, aim.query)
    return None if share is None or share < aim.floor else (min(share, aim.goal), candidate.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """Tries changes of one gene or an exchange between two, and keeps every change for the better.

    A budget is filled by making genes larger; where no gene can grow any more, one grows at another's expense. Steps
    are of all sizes, so that genes of many options are crossed as fast as those of few.

    Attributes:
        space: of the genes.
        price: of a subnet by its genes.
        trials: subnets that are priced.
    """

    space: SearchSpace
    price: Callable[[Genes], Candidate]
    trials: int

    def reached(self, start: Candidate, aim: Aim, rng: Random) -> list[Candidate]:
        """Subnets that fit and are not below the floor, in the order in which they were tried from `start` on."""
        best_rank, genes = rank(start, aim) or (0.0, 0), self.space.genes_of(start.spec)
        fitting = []
        for _ in range(self.trials):
            changed = self._changed(genes, rng)
            candidate = self.price(changed)
            found = rank(candidate, aim)
            if found is not None:
                fitting.append(candidate)
                if found > best_rank:
                    best_rank, genes = found, changed
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
        return self.space.canonical(tuple(changed))


def _step(room: int, rng: Random) -> int:
    """1 or more, at most `room`: any power of two of its fractions alike."""
    return max(1, room >> rng.randrange(room.bit_length()))
