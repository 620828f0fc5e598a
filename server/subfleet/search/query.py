"""What a search is asked, what it answers, the interface of every search, and an index of the submodels that it knows.

The index holds cost estimates as columns of numbers, so that all submodels are compared with a budget at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, fits, list_limits

Integers = NDArray[np.int64]
Identity = tuple[object, ...]
CostEstimates = Callable[[Architecture], Candidate]
"""The cost model: from a submodel its costs, by plain arithmetic in microseconds; a target that cannot train it is
missing in its memory. It raises `ConfigError` if the architecture is no submodel of the network."""

_UNTRAINABLE_BYTES = 2**62
"""The memory of a submodel that the target cannot train, which no budget fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A device that needs a submodel.

    Attributes:
        target: the program target that it runs.
        limits: what it can give.
        refused: why it cannot have a submodel whatever that costs; empty if it can.
        below_parameters: only submodels with fewer parameters are considered.
    """

    target: str
    limits: Budget
    refused: Callable[[Candidate], str] = lambda candidate: ""
    below_parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A submodel that a device can have.

    Attributes:
        utilisation: the larger fraction of memory and links that it takes, 0 to 1.
    """

    candidate: Candidate
    utilisation: float

    @property
    def rank(self) -> tuple[int, float]:
        """Better submodels have a higher rank: more parameters, then higher utilisation."""
        return self.candidate.parameters, self.utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSize:
    """A submodel that a search remembers: an entry of its pool, for the journal.

    Attributes:
        drawn: the paper's random search drew it; else it was built towards a budget.
    """

    architecture: Architecture
    drawn: bool


class Search(Protocol):
    """A way to choose submodels. It is a value: each holder keeps what it knew then. All of its memory is its pool."""

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        """What it has learned, in that order."""
        ...

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        """Look for submodels for one device, without remembering. The same pool, query and stream find the same.

        All of them fit into the pool, so a full pool finds nothing.
        """
        ...

    def with_estimates(self, estimate: CostEstimates) -> "Search":
        """The search with another source of the same cost estimates."""
        ...

    def learn(self, sizes: Sequence[FoundSize]) -> "Search":
        """The search that also knows these submodels; each is known once. The pool only grows."""
        ...

    def best(self, query: Query) -> Fit | None:
        """The known submodel that fits a device best, by `Fit.rank`; None if none fits.

        With the same pool, a device that can give more of anything, and no less of the rest, gets no fewer parameters.
        """
        ...


def satisfies(candidate: Candidate, query: Query) -> bool:
    """Whether a device can have a submodel: it fits, is small enough and is not refused."""
    small = query.below_parameters is None or candidate.parameters < query.below_parameters
    return small and fits(candidate, query.target, query.limits) and not query.refused(candidate)


class Columns(NamedTuple):
    """Cost estimates of many submodels on one target, one row each; the memory of an untrainable one is 2^62."""

    parameters: Integers
    weight_bytes: Integers
    update_bytes: Integers
    forward_macs: Integers
    memory_bytes: Integers

    @property
    def disk_bytes(self) -> Integers:
        """As in `Candidate`."""
        return TRAINED_COPIES * self.weight_bytes

    def find_within(self, limits: Budget) -> NDArray[np.bool_]:
        """Which rows stay within every limit."""
        fits: NDArray[np.bool_] = self.memory_bytes < _UNTRAINABLE_BYTES
        for _, cost, most in list_limits(limits):
            fits &= getattr(self, cost) <= most
        return fits

    def utilisation(self, limits: Budget) -> NDArray[np.float64]:
        """The larger fraction of memory and of the links that each row takes; at most 1 for rows that fit."""
        largest = self.memory_bytes / max(limits.memory_bytes, 1)
        for limit, cost, most in list_limits(limits):
            if limit == "link":
                np.maximum(largest, getattr(self, cost) / max(most, 1), out=largest)
        return largest


class EstimateIndex:
    """Every known submodel once, in the order in which it became known.

    A query reads a few columns of 8 bytes a submodel from end to end. For some thousands of submodels that is faster
    than walking a tree of many dimensions, and nothing has to be kept in balance.

    Args:
        target: the program target of all devices that ask.
        candidates: known from the start.
    """

    def __init__(self, target: str, candidates: Iterable[Candidate] = ()) -> None:
        self.target = target
        self._candidates: list[Candidate] = []
        self._known: set[Identity] = set()
        self._table = np.zeros((len(Columns._fields), 64), dtype=np.int64)
        for candidate in candidates:
            self.add(candidate)

    def copy(self) -> "EstimateIndex":
        """The same submodels, in an index to which others may be added."""
        copy = EstimateIndex(self.target)
        copy._candidates, copy._known, copy._table = [*self._candidates], {*self._known}, self._table.copy()
        return copy

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __contains__(self, architecture: Architecture) -> bool:
        return _identify(architecture) in self._known

    def add(self, candidate: Candidate) -> bool:
        """Remember a submodel; False if it is known already."""
        if candidate.architecture in self:
            return False
        row = len(self._candidates)
        if row == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        memory_bytes = candidate.training_memory_bytes.get(self.target, _UNTRAINABLE_BYTES)
        moved = (candidate.weight_bytes, candidate.update_bytes)
        self._table[:, row] = [candidate.parameters, *moved, candidate.forward_macs, memory_bytes]
        self._candidates.append(candidate)
        self._known.add(_identify(candidate.architecture))
        return True

    def best(self, query: Query) -> Fit | None:
        """The known submodel that fits and has the most parameters; None if none fits.

        Among equally many parameters the higher utilisation wins, then identity, so the answer does not depend on the
        order in which submodels became known.
        """
        columns = self._columns()
        rows = np.flatnonzero(_find_fitting(columns, query))
        utilisation = columns.utilisation(query.limits)
        while len(rows):
            top = rows
            for column in (columns.parameters, utilisation):
                top = top[column[top] == column[top].max()]
            row = int(max(top, key=lambda index: self._candidates[index].architecture))
            if not query.refused(self._candidates[row]):
                return Fit(candidate=self._candidates[row], utilisation=float(utilisation[row]))
            rows = rows[rows != row]
        return None

    def find_starts(self, query: Query, most: int) -> tuple[list[Candidate], list[Candidate]]:
        """Known submodels from which to look for larger ones.

        Returns:
            At most `most` that fit, those with the most parameters first; and as many that do not fit and have more
            parameters than these, the ones that exceed the budget least first.
        """
        columns = self._columns()
        fits = _find_fitting(columns, query)
        within = np.flatnonzero(fits)
        within = within[np.argsort(-columns.parameters[within], kind="stable")][:most]
        least = columns.parameters[within[0]] if len(within) else 0
        beyond = np.flatnonzero(~fits & (columns.parameters > least))
        excess = columns.utilisation(query.limits)
        if query.limits.forward_macs is not None:
            excess = np.maximum(excess, columns.forward_macs / max(query.limits.forward_macs, 1))
        beyond = beyond[np.argsort(excess[beyond], kind="stable")][:most]
        return [self._candidates[row] for row in within], [self._candidates[row] for row in beyond]

    def stands_in(self, candidate: Candidate, query: Query, slack: float) -> bool:
        """Whether a known submodel takes no more of anything that the query limits, and has nearly as many parameters.

        Args:
            candidate: the submodel to be replaced.
            query: whether multiply-accumulates are limited.
            slack: fraction of its parameters that may be missing.
        """
        columns = self._columns()
        near = columns.parameters >= (1 - slack) * candidate.parameters
        near &= columns.memory_bytes <= candidate.training_memory_bytes.get(self.target, _UNTRAINABLE_BYTES)
        near &= (columns.weight_bytes <= candidate.weight_bytes) & (columns.update_bytes <= candidate.update_bytes)
        if query.limits.forward_macs is not None:
            near &= columns.forward_macs <= candidate.forward_macs
        return bool(near.any())

    def _columns(self) -> Columns:
        return Columns(*self._table[:, : len(self._candidates)])


def _find_fitting(columns: Columns, query: Query) -> NDArray[np.bool_]:
    fits = columns.find_within(query.limits)
    return fits if query.below_parameters is None else fits & (columns.parameters < query.below_parameters)


def _identify(architecture: Architecture) -> Identity:
    """Equal for equal submodels whatever their names, as their ids are, but without computing a digest."""
    return architecture.axes, architecture.blocks, architecture.choices
