"""Draw paths of a supernet, an operator for each choice, within budgets (FedorAS, section 3.1).

A path is valid if its cost is at most the budget for every resource. "exact" draws valid paths uniformly; "greedy" does
not, but needs no table.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.paths import PathSampler

_Grid = npt.NDArray[np.float64]
_Costs = npt.NDArray[np.float64]
_LEVELS = {1: 4096, 2: 128}
"""Number of steps of a budget in the tables of "exact", by the number of binding resources."""
_WEIGHTS = 33
"""Weightings of two resources to try when looking for a path that fits both, before a table is used."""
_MOST_TRIES = 1000
"""Most draws of "reject" before it uses a table like "exact", because a tight budget would keep a device busy; and most
draws of "exact" before it draws from the valid paths that remain when costs are rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlace:
    """A choice of a supernet.

    Attributes:
        name: name of the choice.
        operators: names of its operators, at least one.
        costs: cost of each operator for each resource, at least 0; an operator with infinite cost is never drawn.
    """

    name: str
    operators: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]


class PathDrawer:
    """Draws paths within budgets; create it once for many draws.

    Args:
        places: the choices in order.
        budgets: budget of each resource; None for no limit.
        sampler: how paths are drawn; see `PathSampler`.

    Raises:
        ConfigError: no path is valid; the message names the choice or resource.
    """

    def __init__(self, choices: Sequence[PathPlace], budgets: Sequence[float | None], sampler: PathSampler) -> None:
        self._sampler = sampler
        self._usable = [_find_usable(choice, len(budgets)) for choice in choices]
        costs = [
            np.array([choice.costs[index] for index in own]) for choice, own in zip(choices, self._usable, strict=True)
        ]
        most = sum((own.max(axis=0) for own in costs), np.zeros(len(budgets)))
        binding = [at for at, limit in enumerate(budgets) if limit is not None and most[at] > limit]
        self._operators = [
            [choice.operators[index] for index in own] for choice, own in zip(choices, self._usable, strict=True)
        ]
        self._costs = [own[:, binding] for own in costs]
        self._limits = np.array([budgets[at] for at in binding], dtype=np.float64)
        self._tables: dict[bool, _Table] = {}
        self._fallback = self._find_fallback()
        # Choices without a free operator come first (FedorAS, below equation 3).
        self._free = [bool((own.sum(axis=1) == 0).any()) for own in costs]

    def draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        """Draw a valid path: an operator for each choice, in order."""
        if not len(self._limits):
            chosen = [int(rng.integers(len(own))) for own in self._operators]
        elif self._sampler == "greedy":
            chosen = self._draw_greedily(rng)
        elif self._sampler == "exact":
            chosen = self._draw_uniformly(rng)
        else:
            chosen = self._draw_by_rejection(rng)
        return tuple(own[index] for own, index in zip(self._operators, chosen, strict=True))

    def _draw_greedily(self, rng: np.random.Generator) -> list[int]:
        """Draw each operator uniformly from those that fit beside the reserve for the remaining choices."""
        order = sorted(range(len(self._costs)), key=lambda at: (self._free[at], rng.random()))
        chosen = [*self._fallback]
        left = self._limits - _sum_costs(self._costs, chosen)
        for at in order:
            room = left + self._costs[at][chosen[at]]
            fitting = np.flatnonzero((self._costs[at] <= room).all(axis=1))
            chosen[at] = int(fitting[rng.integers(len(fitting))])
            left = room - self._costs[at][chosen[at]]
        return chosen

    def _draw_by_rejection(self, rng: np.random.Generator) -> list[int]:
        for _ in range(_MOST_TRIES):
            chosen = [int(rng.integers(len(own))) for own in self._operators]
            if (_sum_costs(self._costs, chosen) <= self._limits).all():
                return chosen
        return self._draw_uniformly(rng)

    def _draw_uniformly(self, rng: np.random.Generator) -> list[int]:
        # With costs rounded down, the table contains all valid paths and some others, which are drawn again.
        for _ in range(_MOST_TRIES):
            chosen = self._get_table(up=False).draw(rng)
            if (_sum_costs(self._costs, chosen) <= self._limits).all():
                return chosen
        # With costs rounded up, the table may be empty although a few paths use up the whole budget.
        return self._get_table(up=True).draw(rng) if self._get_table(up=True).any_path else [*self._fallback]

    def _get_table(self, *, up: bool) -> "_Table":
        if up not in self._tables:
            self._tables[up] = _Table(self._costs, self._limits, up=up)
        return self._tables[up]

    def _find_fallback(self) -> list[int]:
        """Find a valid path that "greedy" holds as a reserve for the remaining choices; the cheapest for one resource.

        With the reserve no draw can get stuck, unlike in the published algorithm.
        """
        for chosen in self._iterate_light_paths():
            if (_sum_costs(self._costs, chosen) <= self._limits).all():
                return chosen
        least = sum((own.min(axis=0) for own in self._costs), np.zeros(len(self._limits)))
        if (least <= self._limits).all() and self._get_table(up=True).any_path:
            return self._get_table(up=True).draw(np.random.default_rng(0))
        raise ConfigError(
            f"no path fits the budgets {self._limits.tolist()}: the cheapest operators cost {least.tolist()}; raise "
            "the budgets"
        )

    def _iterate_light_paths(self) -> Iterator[list[int]]:
        if not len(self._limits):
            yield [0] * len(self._costs)
            return
        shares = [own / np.maximum(self._limits, 1) for own in self._costs]
        for weight in np.linspace(0, 1, _WEIGHTS if len(self._limits) > 1 else 1):
            weights = np.array([1 - weight, weight])[: len(self._limits)]
            # Of operators with the same weighted cost, the one with the least total cost.
            yield [int(np.lexsort((own.sum(axis=1), own @ weights))[0]) for own in shares]


class _Table:
    """The number of ways to continue from each choice, for each remaining budget.

    Costs are rounded to steps of the budgets: up, so that no drawn path exceeds them, or down, so that no valid path is
    missing. Small integer budgets are exact.
    """

    def __init__(self, costs: Sequence[_Costs], limits: npt.NDArray[np.float64], *, up: bool) -> None:
        levels = _LEVELS[len(limits)]
        steps = np.maximum(limits / levels, 1.0)
        self._levels = tuple(int(level) for level in limits // steps)
        rounded = np.ceil if up else np.floor
        self._costs = [rounded(own / steps).astype(np.int64) for own in costs]
        counts = [np.ones([level + 1 for level in self._levels])]
        for own in reversed(self._costs):
            counts.append(sum((_shift_counts(counts[-1], cost) for cost in own), np.zeros_like(counts[-1])))
        self._counts = counts[::-1]

    @property
    def any_path(self) -> bool:
        """Whether there is a path."""
        return bool(self._counts[0][self._levels] > 0)

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Draw a path uniformly."""
        left, chosen = np.array(self._levels), list[int]()
        for own, after in zip(self._costs, self._counts[1:], strict=True):
            rest = left - own
            ways = np.array([after[tuple(budget)] if (budget >= 0).all() else 0.0 for budget in rest])
            chosen.append(int(np.searchsorted(np.cumsum(ways), rng.random() * ways.sum(), side="right")))
            left = rest[chosen[-1]]
        return chosen


def _shift_counts(counts: _Grid, cost: npt.NDArray[np.int64]) -> _Grid:
    """For each budget, the count of the budget that remains after a cost; 0 if the cost exceeds the budget."""
    shifted = np.zeros_like(counts)
    if (cost < counts.shape).all():
        target = tuple(slice(int(part), None) for part in cost)
        source = tuple(slice(0, size - int(part)) for part, size in zip(cost, counts.shape, strict=True))
        shifted[target] = counts[source]
    return shifted


def _sum_costs(costs: Sequence[_Costs], chosen: Sequence[int]) -> npt.NDArray[np.float64]:
    width = costs[0].shape[1] if costs else 0
    return sum((own[index] for own, index in zip(costs, chosen, strict=True)), np.zeros(width))


def _find_usable(choice: PathPlace, resources: int) -> list[int]:
    if len(choice.costs) != len(choice.operators) or any(len(own) != resources for own in choice.costs):
        raise ConfigError(
            f"choice {choice.name!r} must have a cost for each operator and each of {resources} resources"
        )
    usable = [at for at, own in enumerate(choice.costs) if max(own, default=0.0) < math.inf]
    if not usable:
        raise ConfigError(f"choice {choice.name!r} has no operator that can be run")
    return usable
