"""Larger submodels near those that are known, for one budget: exchanges that end where nothing fits any more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.query import CostEstimates, Query, fit_of

__all__ = ["Climb"]

_LOWERED = 2
_RAISED = 3
_FROM_ABOVE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """Gives up a little of a known submodel, and takes as much of something else as fits.

    A gene that grows makes a submodel that costs more of everything, so the most that it can grow by is found by
    halving.
    Submodels that are just too large are starts as good as those that fit: the optimum is often one of them without a
    little that takes much memory and has few parameters.

    Attributes:
        space: of the genes.
        estimate: of its submodels.
        trials: submodels that are estimated.
    """

    space: SearchSpace
    estimate: CostEstimates
    trials: int

    def tried(self, below: Sequence[Genes], above: Sequence[Genes], query: Query, rng: Random) -> list[Candidate]:
        """Every submodel that was looked at, whether it fits or not.

        Args:
            below: starts that fit, the best first; one or more.
            above: starts that do not.
            query: of the device.
            rng: decides everything.
        """
        trials = _Trials(estimate=self._estimated, query=query, left=self.trials)
        starts = list(below)
        for _ in range(self.trials):  # what is known already costs no trial
            if not trials.left:
                break
            start = rng.choice(above) if above and rng.random() < _FROM_ABOVE else rng.choice(starts)
            ended = self._exchanged(start, trials, rng)
            if ended is not None and ended not in starts:
                starts.append(ended)
        return list(trials.seen.values())

    def _exchanged(self, start: Genes, trials: "_Trials", rng: Random) -> Genes | None:
        genes, order = list(start), list(range(len(start)))
        rng.shuffle(order)
        lowered = rng.randint(0, _LOWERED)
        for done, place in enumerate(order):
            if done >= lowered and trials.fits(genes):
                break
            if genes[place]:
                genes[place] -= _step(genes[place], rng)
        if not trials.fits(genes):
            return None
        rng.shuffle(order)
        for place in order[:_RAISED]:
            genes[place] = self._most(genes, place, trials)
        return tuple(genes)

    def _most(self, genes: Sequence[int], place: int, trials: "_Trials") -> int:
        """The largest option of a gene with which a submodel fits that fits with its present one."""
        low, high, step = genes[place], self.space.largest[place], 1
        while low < high and trials.left:
            tried = min(high, low + step)
            if trials.fits([*genes[:place], tried, *genes[place + 1 :]]):
                low, step = tried, 2 * step
            else:
                high, step = tried - 1, max(1, (tried - low) // 2)
        return low

    def _estimated(self, genes: Sequence[int]) -> Candidate:
        return self.estimate(self.space.architecture(tuple(genes)))


@dataclass(slots=True, kw_only=True)
class _Trials:
    """What was looked at in one climb."""

    estimate: Callable[[Sequence[int]], Candidate]
    query: Query
    left: int
    seen: dict[Architecture, Candidate] = field(default_factory=dict)
    known: dict[Genes, bool] = field(default_factory=dict)

    def fits(self, genes: Sequence[int]) -> bool:
        asked = tuple(genes)
        if asked not in self.known:
            candidate = self.estimate(asked)
            if candidate.architecture not in self.seen:
                self.seen[candidate.architecture] = candidate
                self.left = max(0, self.left - 1)
            self.known[asked] = fit_of(candidate, self.query) is not None
        return self.known[asked]


def _step(room: int, rng: Random) -> int:
    """1 or more, at most `room`: any power of two of its fractions alike."""
    return max(1, room >> rng.randrange(room.bit_length()))
