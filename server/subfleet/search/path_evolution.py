"""Evolutionary search among the paths of a supernet that are of one tier (FedorAS, section 3.2), with pymoo.

Each generation follows from all that was told before it: the search is begun anew, asked and told as it was, so that
a run that is taken up goes on with the same paths.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Fraction, Positive
from subfleet.search.tiers import Tier

__all__ = ["EvolutionSettings", "best", "next_population"]

Path = tuple[str, ...]
Scored = tuple[Path, float]
_MOST_ASKS, _MOST_DRAWS = 50, 20_000
"""How often more offspring are asked for, where those before are known or of other tiers; and how many paths are drawn
in their place before it is taken that there are no further ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class EvolutionSettings:
    """How a tier is searched; the published numbers are the defaults.

    Attributes:
        evaluations: paths that are scored at most, 1 or more.
        population: of which offspring come, 2 or more; the first as many paths are drawn.
        offspring: paths that are scored in each generation after the first, 1 or more.
        mutation: chance of each operator of a path to be drawn anew, 0 to 1.
        objectives: "accuracy" looks for the best path; "accuracy_macs" also for those that are nearly as good and take
            fewer multiplications.
        target: a score at which the search of a tier stops; None goes on.
    """

    evaluations: Positive = 1000
    population: Annotated[int, Range(least=2)] = 128
    offspring: Positive = 64
    mutation: Fraction = 0.1
    objectives: Literal["accuracy", "accuracy_macs"] = "accuracy"
    target: float | None = None


def next_population(
    settings: EvolutionSettings,
    choices: Sequence[Sequence[str]],
    macs_of: Callable[[Path], int],
    tier: Tier,
    told: Sequence[Scored],
    *,
    seed: int,
) -> tuple[Path, ...]:
    """The paths that are to be scored next: of the tier alone, and none that was scored before.

    Args:
        settings: of the search.
        choices: the operators of each choice.
        macs_of: a path to its multiplications.
        tier: that paths must be of.
        told: paths that have been scored, with their scores, in the order in which they were proposed.
        seed: of all that is drawn.

    Returns:
        None where as many have been scored as may be, one has reached the target, or no further one is found.
    """
    left = settings.evaluations - len(told)
    reached = settings.target is not None and any(score >= settings.target for _, score in told)
    if left <= 0 or reached:
        return ()
    evolution = _Evolution(settings, _Tiered(choices, macs_of, tier), seed)
    scores, begun = dict(told), 0
    while True:
        paths = evolution.ask(settings.evaluations - begun)
        if begun == len(told) or not paths:
            return paths
        evolution.tell([scores[path] for path in paths])
        begun += len(paths)


def best(told: Sequence[Scored], macs_of: Callable[[Path], int]) -> Scored:
    """The path of the highest score; of equals that which takes fewest multiplications, then the first by name."""
    return min(told, key=lambda one: (-one[1], macs_of(one[0]), one[0]))


class _Tiered:
    """The paths of a tier, as pymoo has them: the place of each choice's operator."""

    def __init__(self, choices: Sequence[Sequence[str]], macs_of: Callable[[Path], int], tier: Tier) -> None:
        self.counts = np.array([len(own) for own in choices])
        self._choices, self.macs_of, self._tier = choices, macs_of, tier

    def path(self, places: Iterable[int]) -> Path:
        """The operators at places."""
        return tuple(own[one] for own, one in zip(self._choices, places, strict=True))

    def places(self, path: Path) -> list[int]:
        """The places of operators."""
        return [own.index(one) for own, one in zip(self._choices, path, strict=True)]

    def holds(self, path: Path) -> bool:
        """Whether a path is of the tier."""
        return self._tier.holds(self.macs_of(path))

    def draw(self, rng: np.random.Generator) -> Path:
        """Any path, all equally likely."""
        return self.path(rng.integers(self.counts))


class _Evolution:
    """One search: asked for paths and told of their scores in turn.

    What is of another tier is never proposed, so that a population has no path that violates its constraint.
    """

    def __init__(self, settings: EvolutionSettings, space: _Tiered, seed: int) -> None:
        self._settings, self._space, self._seed = settings, space, seed
        self._rng = np.random.default_rng(seed)
        self._known: dict[Path, None] = {}
        self._asked: tuple[Path, ...] = ()
        self._algorithm: Any = None

    def ask(self, most: int) -> tuple[Path, ...]:
        """Up to so many paths of the tier that were not asked before."""
        found: dict[Path, None] = {}
        wanted = min(most, self._settings.offspring if self._algorithm else self._settings.population)
        for _ in range(_MOST_ASKS if self._algorithm else 0):
            for one in self._algorithm.ask():
                self._take(self._space.path(one.X), found)
            if len(found) >= wanted:
                break
        for _ in range(_MOST_DRAWS):
            if len(found) >= wanted:
                break
            self._take(self._space.draw(self._rng), found)
        self._asked = tuple(found)[:wanted]
        self._known |= dict.fromkeys(self._asked)
        return self._asked

    def tell(self, scores: Sequence[float]) -> None:
        """The scores of the paths that were asked last."""
        from pymoo.core.population import Population

        two = self._settings.objectives == "accuracy_macs"
        told = Population.new("X", np.array([self._space.places(path) for path in self._asked]))
        goals = [
            [-score, *([self._space.macs_of(path)] if two else [])]
            for path, score in zip(self._asked, scores, strict=True)
        ]
        told.set("F", np.array(goals, dtype=np.float64))
        for one in told:
            one.evaluated.add("F")
        if self._algorithm is None:
            self._algorithm = self._begun(told)
        self._algorithm.tell(infills=told)

    def _take(self, path: Path, found: dict[Path, None]) -> None:
        if path not in self._known and self._space.holds(path):
            found[path] = None

    def _begun(self, first: Any) -> Any:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.algorithms.soo.nonconvex.ga import GA
        from pymoo.core.problem import Problem
        from pymoo.operators.crossover.hux import HUX
        from pymoo.termination.max_gen import MaximumGenerationTermination

        two = self._settings.objectives == "accuracy_macs"
        made = NSGA2 if two else partial(GA, advance_after_initial_infill=True)
        algorithm = made(
            pop_size=self._settings.population,
            n_offsprings=self._settings.offspring,
            sampling=first,
            crossover=HUX(),
            mutation=_redrawing(self._settings.mutation),
            eliminate_duplicates=False,
        )
        counts = self._space.counts
        problem = Problem(n_var=len(counts), n_obj=1 + two, xl=0, xu=counts - 1, vtype=int)
        # It is asked and told for as long as the caller likes.
        algorithm.setup(problem, termination=MaximumGenerationTermination(10**9), seed=self._seed)
        algorithm.ask()
        return algorithm


def _redrawing(chance: float) -> Any:
    """A mutation that draws operators anew: pymoo's own move a number to one near it, but operators have no order."""
    from pymoo.core.mutation import Mutation

    class Redrawing(Mutation):  # type: ignore[misc]  # pymoo's
        def _do(self, problem: Any, places: Any, *_: Any, random_state: np.random.Generator, **__: Any) -> Any:
            anew = random_state.random(places.shape) < chance
            return np.where(anew, random_state.integers(problem.xu + 1, size=places.shape), places)

    return Redrawing()
