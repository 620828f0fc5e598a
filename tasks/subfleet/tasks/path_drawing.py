"""Draws of paths: one operator of each place of a supernet, within budgets (FedorAS, section 3.1).

All go by the same rule: a path is valid where what it costs is at most the budget, of every resource. "exact" draws
every valid path equally often; "greedy" does not, but needs no table.
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
"""Into how many steps a budget is divided where "exact" counts paths, by how many resources bind."""
_WEIGHTS = 33
"""How many weighings of resources are tried before a path that fits all of them is looked for in a table."""
_MOST_TRIES = 1000
"""Of "reject", after which it draws from a table as "exact" does: a tight budget would keep a device busy; and of
"exact", after which it draws among those valid paths that costs rounded up leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlace:
    """A place of a supernet.

    Attributes:
        name: of the choice.
        operators: one or more.
        costs: of each operator what it takes of each resource, 0 or more; one that costs infinity is never drawn.
    """

    name: str
    operators: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]


class PathDrawer:
    """Draws paths within budgets, made once for many draws.

    Args:
        places: in order.
        budgets: of each resource; None is no limit.
        sampler: how; see `PathSampler`.

    Raises:
        ConfigError: no path is valid; it says of which place or resource that is.
    """

    def __init__(self, places: Sequence[PathPlace], budgets: Sequence[float | None], sampler: PathSampler) -> None:
        self._sampler = sampler
        self._usable = [_find_usable(place, len(budgets)) for place in places]
        costs = [np.array([place.costs[one] for one in own]) for place, own in zip(places, self._usable, strict=True)]
        most = sum((own.max(axis=0) for own in costs), np.zeros(len(budgets)))
        binding = [at for at, limit in enumerate(budgets) if limit is not None and most[at] > limit]
        self._operators = [
            [place.operators[one] for one in own] for place, own in zip(places, self._usable, strict=True)
        ]
        self._costs = [own[:, binding] for own in costs]
        self._limits = np.array([budgets[at] for at in binding], dtype=np.float64)
        self._tables: dict[bool, _Table] = {}
        self._fallback = self._find_fallback()
        # Places without a free operator come first (FedorAS, below equation 3).
        self._free = [bool((own.sum(axis=1) == 0).any()) for own in costs]

    def draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        """A valid path: an operator for each place, in order."""
        if not len(self._limits):
            chosen = [int(rng.integers(len(own))) for own in self._operators]
        elif self._sampler == "greedy":
            chosen = self._draw_greedily(rng)
        elif self._sampler == "exact":
            chosen = self._draw_uniformly(rng)
        else:
            chosen = self._draw_by_rejection(rng)
        return tuple(own[one] for own, one in zip(self._operators, chosen, strict=True))

    def _draw_greedily(self, rng: np.random.Generator) -> list[int]:
        """Operator by operator, uniformly among those that fit beside what is set aside for places still to come."""
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
        # By costs that are rounded down every valid path is there, and some beside them, which are drawn anew.
        for _ in range(_MOST_TRIES):
            chosen = self._get_table(up=False).draw(rng)
            if (_sum_costs(self._costs, chosen) <= self._limits).all():
                return chosen
        # By costs that are rounded up, the few paths that take all of a budget may be none.
        return self._get_table(up=True).draw(rng) if self._get_table(up=True).any_path else [*self._fallback]

    def _get_table(self, *, up: bool) -> "_Table":
        if up not in self._tables:
            self._tables[up] = _Table(self._costs, self._limits, up=up)
        return self._tables[up]

    def _find_fallback(self) -> list[int]:
        """A valid path, of which "greedy" sets aside what places still to come cost; of one resource the cheapest.

        With it no draw can end where nothing fits any more, as the published one can.
        """
        for chosen in self._iterate_light_paths():
            if (_sum_costs(self._costs, chosen) <= self._limits).all():
                return chosen
        least = sum((own.min(axis=0) for own in self._costs), np.zeros(len(self._limits)))
        if (least <= self._limits).all() and self._get_table(up=True).any_path:
            return self._get_table(up=True).draw(np.random.default_rng(0))
        raise ConfigError(
            f"no path fits: the cheapest takes {least.tolist()} and the budgets are {self._limits.tolist()}; raise them"
        )

    def _iterate_light_paths(self) -> Iterator[list[int]]:
        if not len(self._limits):
            yield [0] * len(self._costs)
            return
        shares = [own / np.maximum(self._limits, 1) for own in self._costs]
        for weight in np.linspace(0, 1, _WEIGHTS if len(self._limits) > 1 else 1):
            weights = np.array([1 - weight, weight])[: len(self._limits)]
            # Of operators that weigh the same, that which takes least of anything.
            yield [int(np.lexsort((own.sum(axis=1), own @ weights))[0]) for own in shares]


class _Table:
    """How many paths go on from each place, for what is left of the budgets.

    Costs are rounded to steps of the budgets: up, so that nothing drawn exceeds them, or down, so that nothing that is
    valid is left out; where budgets are whole numbers of few steps, they are exact.
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
        """Whether there is one."""
        return bool(self._counts[0][self._levels] > 0)

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Every path equally often."""
        left, chosen = np.array(self._levels), list[int]()
        for own, after in zip(self._costs, self._counts[1:], strict=True):
            rest = left - own
            ways = np.array([after[tuple(one)] if (one >= 0).all() else 0.0 for one in rest])
            chosen.append(int(np.searchsorted(np.cumsum(ways), rng.random() * ways.sum(), side="right")))
            left = rest[chosen[-1]]
        return chosen


def _shift_counts(counts: _Grid, cost: npt.NDArray[np.int64]) -> _Grid:
    """For each budget the count of what is left of it after a cost; 0 where it is beyond it."""
    found = np.zeros_like(counts)
    if (cost < counts.shape).all():
        to = tuple(slice(int(one), None) for one in cost)
        of = tuple(slice(0, size - int(one)) for one, size in zip(cost, counts.shape, strict=True))
        found[to] = counts[of]
    return found


def _sum_costs(costs: Sequence[_Costs], chosen: Sequence[int]) -> npt.NDArray[np.float64]:
    width = costs[0].shape[1] if costs else 0
    return sum((own[one] for own, one in zip(costs, chosen, strict=True)), np.zeros(width))


def _find_usable(place: PathPlace, resources: int) -> list[int]:
    if len(place.costs) != len(place.operators) or any(len(own) != resources for own in place.costs):
        raise ConfigError(f"place {place.name!r} must tell of each operator what it takes of {resources} resources")
    usable = [at for at, own in enumerate(place.costs) if max(own, default=0.0) < math.inf]
    if not usable:
        raise ConfigError(f"place {place.name!r} has no operator that can be run")
    return usable
