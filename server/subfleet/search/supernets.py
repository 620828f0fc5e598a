"""Supernets: operators within a budget of bytes, tiers by what paths compute, and the best path of a tier (FedorAS).

The search is evolutionary (section 3.2), with pymoo. Each generation follows from all scores before it: the search is
replayed from its beginning, so that a run that is continued proposes the same paths.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from random import Random
from typing import Annotated, Any, Literal

import numpy as np

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Fraction, Positive

Path = tuple[str, ...]
Scored = tuple[Path, float]

_CUMULATIVE = 0.95
"""The fraction of random paths that the tiers below the highest divide among them."""
_DRAWS = 100_000
_MOST_ASKS, _MOST_DRAWS = 50, 20_000
_DRAWN_TOGETHER = 256  # a call of NumPy's takes longer than what it draws
"""How often offspring are requested if earlier ones are known or of other tiers, and how many paths are drawn instead
before the search ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier of devices: its paths take more than `low_macs` and at most `high_macs`; the first includes `low_macs`.

    Attributes:
        number: from 1.
        low_macs: multiply-accumulates of one sample's forward pass.
        high_macs: the same; the budget of its devices.
    """

    number: int
    low_macs: int
    high_macs: int

    def holds(self, forward_macs: int) -> bool:
        """Whether a path with so many multiply-accumulates belongs to this tier."""
        least = self.low_macs if self.number == 1 else self.low_macs + 1
        return least <= forward_macs <= self.high_macs


@lru_cache(maxsize=8)  # it takes as long as the assignments of several clients
def list_tiers(fixed_macs: int, choices: tuple[tuple[int, ...], ...], count: int, seed: int) -> tuple[Tier, ...]:
    """The tiers of a supernet (FedorAS, section 4.1, "Clusters definition").

    Of 100,000 random paths with equally likely operators, 95 % lie below the highest tier, which extends to the most
    expensive path; the other bounds are evenly spaced from the cheapest path on. If the most expensive path alone is
    drawn more often than that, so that nothing lies above, all bounds are evenly spaced up to it.

    Args:
        fixed_macs: of the parts that every path has.
        choices: of each choice, the multiply-accumulates of its operators.
        count: how many tiers, 1 or more.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    total = np.full(_DRAWS, fixed_macs, dtype=np.int64)
    for costs in choices:
        total += rng.choice(np.array(costs, dtype=np.int64), size=_DRAWS)
    least, most = (fixed_macs + sum(map(pick, choices)) for pick in (min, max))
    upper = np.quantile(total, _CUMULATIVE)
    bounds = [*np.linspace(least, upper, count), most] if upper < most else np.linspace(least, most, count + 1)
    return tuple(
        Tier(number=number, low_macs=int(low), high_macs=int(high))
        for number, (low, high) in enumerate(pairwise(bounds), start=1)
    )


def find_tier(tiers: Sequence[Tier], forward_macs: int) -> Tier:
    """The highest tier that a device has the budget for; the lowest if it has the budget of no tier."""
    return next((tier for tier in reversed(tiers) if tier.high_macs <= forward_macs), tiers[0])


def draw_subspace(
    choices: Mapping[str, Mapping[str, int]], budget_bytes: float, rng: Random
) -> dict[str, tuple[str, ...]] | None:
    """Draw the operators that a client gets (FedorAS, equation 1).

    Operators without parameters come first, then one of each choice that has none of these, then others while they
    fit. All operators are equally likely to be next, but only small ones fit in the end, so these are kept more often
    than large ones, as in the public code.

    Args:
        choices: of each choice, in network order, the bytes of the operators that the device can run; one choice or
            more.
        budget_bytes: for all of them together.
        rng: the source of the draw.

    Returns:
        The operators of each choice, in network order; None if not one of each fits.
    """
    kept = {name: {operator for operator, size in sizes.items() if not size} for name, sizes in choices.items()}
    lacking = [name for name, operators in kept.items() if not operators]
    left = budget_bytes
    reserved = sum(min(choices[name].values(), default=0) for name in lacking)
    if not all(choices.values()) or reserved > left:
        return None
    rng.shuffle(lacking)
    for name in lacking:
        sizes = choices[name]
        reserved -= min(sizes.values())
        operator = rng.choice([operator for operator, size in sizes.items() if size <= left - reserved])
        kept[name].add(operator)
        left -= sizes[operator]
    others = [(name, operator) for name, sizes in choices.items() for operator in sizes if operator not in kept[name]]
    rng.shuffle(others)
    for name, operator in others:
        if choices[name][operator] <= left:
            kept[name].add(operator)
            left -= choices[name][operator]
    return {name: tuple(operator for operator in sizes if operator in kept[name]) for name, sizes in choices.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class EvolutionSettings:
    """How a tier is searched; the published numbers are the defaults.

    Attributes:
        evaluations: the most paths that are scored, 1 or more.
        population: from which offspring are made, 2 or more; the first generation is drawn at random.
        offspring: paths that are scored in each generation after the first, 1 or more.
        mutation: probability of each operator of a path to be drawn again, 0 to 1.
        objectives: "accuracy" searches for the best path; "accuracy_macs" also for nearly as good ones that take fewer
            multiply-accumulates.
        target: the search of a tier stops at this score; None goes on.
    """

    evaluations: Positive = 1000
    population: Annotated[int, Range(least=2)] = 128
    offspring: Positive = 64
    mutation: Fraction = 0.1
    objectives: Literal["accuracy", "accuracy_macs"] = "accuracy"
    target: float | None = None


def propose_paths(
    settings: EvolutionSettings,
    choices: Sequence[Sequence[str]],
    count_macs: Callable[[Path], int],
    tier: Tier,
    scored: Sequence[Scored],
    *,
    seed: int,
) -> tuple[Path, ...]:
    """The paths to score next: of the tier, and none that has been scored.

    Args:
        settings: of the search.
        choices: the operators of each choice.
        count_macs: the multiply-accumulates of a path.
        tier: that paths must belong to.
        scored: paths with their scores, in the order in which they were proposed.
        seed: of all random choices.

    Returns:
        Empty if enough paths have been scored, one has reached the target, or no other is found.
    """
    reached = settings.target is not None and any(score >= settings.target for _, score in scored)
    if len(scored) >= settings.evaluations or reached:
        return ()
    evolution = _Evolution(
        settings=settings,
        choices=choices,
        count_macs=count_macs,
        tier=tier,
        seed=seed,
        draws=_draw_indices([len(operators) for operators in choices], seed),
    )
    scores, replayed = dict(scored), 0
    while True:
        paths = evolution.ask(settings.evaluations - replayed)
        if replayed == len(scored) or not paths:
            return paths
        evolution.tell(paths, [scores[path] for path in paths])
        replayed += len(paths)


def find_best(scored: Sequence[Scored], count_macs: Callable[[Path], int]) -> Scored:
    """The path with the highest score; among equals the one with fewest multiply-accumulates, then by name."""
    return min(scored, key=lambda item: (-item[1], count_macs(item[0]), item[0]))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of scores of the same things, in the same order, from -1 to 1.

    Returns:
        None if there are fewer than two things, or if all scores of a list are equal: there is no ranking then.
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(first, second).statistic) if len(first) > 1 else math.nan
    return None if math.isnan(tau) else tau


@dataclass(slots=True, kw_only=True)
class _Evolution:
    """One search, which proposes paths and takes their scores in turn.

    For pymoo a path is the index of each choice's operator. Paths of other tiers (`outside`) are never proposed, so no
    member of a population violates its constraint.
    """

    settings: EvolutionSettings
    choices: Sequence[Sequence[str]]
    count_macs: Callable[[Path], int]
    tier: Tier
    seed: int
    draws: Iterator[list[int]]
    known: set[Path] = field(default_factory=set)
    outside: set[Path] = field(default_factory=set)
    algorithm: Any = None

    def ask(self, most: int) -> tuple[Path, ...]:
        """Up to so many paths of the tier that were not proposed before."""
        new: dict[Path, None] = {}
        count = min(most, self.settings.offspring if self.algorithm else self.settings.population)
        for _ in range(_MOST_ASKS if self.algorithm else 0):
            for member in self.algorithm.ask():
                self._add(member.X, new)
            if len(new) >= count:
                break
        for _ in range(_MOST_DRAWS):
            if len(new) >= count:
                break
            self._add(next(self.draws), new)
        paths = tuple(new)[:count]
        self.known.update(paths)
        return paths

    def tell(self, paths: Sequence[Path], scores: Sequence[float]) -> None:
        """Add the scores of the paths that were proposed last."""
        from pymoo.core.population import Population

        indices = [
            [operators.index(operator) for operators, operator in zip(self.choices, path, strict=True)]
            for path in paths
        ]
        members = Population.new("X", np.array(indices))
        goals = [[-score, self.count_macs(path)] for path, score in zip(paths, scores, strict=True)]
        members.set("F", np.array(goals, dtype=np.float64)[:, : self._objective_count])
        for member in members:
            member.evaluated.add("F")
        if self.algorithm is None:
            self.algorithm = self._start(members)
        self.algorithm.tell(infills=members)

    @property
    def _objective_count(self) -> int:
        return 2 if self.settings.objectives == "accuracy_macs" else 1

    def _add(self, indices: Iterable[int], new: dict[Path, None]) -> None:
        path = tuple(operators[index] for operators, index in zip(self.choices, indices, strict=True))
        if path in self.known or path in self.outside:
            return
        if self.tier.holds(self.count_macs(path)):
            new[path] = None
        else:
            self.outside.add(path)

    def _start(self, first: Any) -> Any:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.algorithms.soo.nonconvex.ga import GA
        from pymoo.core.problem import Problem
        from pymoo.operators.crossover.hux import HUX
        from pymoo.termination.max_gen import MaximumGenerationTermination

        kind = NSGA2 if self._objective_count > 1 else partial(GA, advance_after_initial_infill=True)
        algorithm = kind(
            pop_size=self.settings.population,
            n_offsprings=self.settings.offspring,
            sampling=first,
            crossover=HUX(),
            mutation=_build_mutation(self.settings.mutation),
            eliminate_duplicates=False,
        )
        most = np.array([len(operators) - 1 for operators in self.choices])
        problem = Problem(n_var=len(most), n_obj=self._objective_count, xl=0, xu=most, vtype=int)
        # The caller decides when the search ends.
        algorithm.setup(problem, termination=MaximumGenerationTermination(10**9), seed=self.seed)
        algorithm.ask()
        return algorithm


def _draw_indices(counts: Sequence[int], seed: int) -> Iterator[list[int]]:
    """The index of an operator for each choice, drawn again and again."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.integers(counts, size=(_DRAWN_TOGETHER, len(counts))).tolist()


def _build_mutation(probability: float) -> Any:
    """A mutation that draws operators again: pymoo's own moves a number to a near one, but operators have no order."""
    from pymoo.core.mutation import Mutation

    class Redraw(Mutation):  # type: ignore[misc]  # pymoo has no types
        def _do(self, problem: Any, genes: Any, *_: Any, random_state: np.random.Generator, **__: Any) -> Any:
            redrawn = random_state.random(genes.shape) < probability
            return np.where(redrawn, random_state.integers(problem.xu + 1, size=genes.shape), genes)

    return Redraw()
