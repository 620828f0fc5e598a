"""Estimated submodels as columns of numbers, so that all of them are held against a budget at once."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.limits import UNTRAINABLE_BYTES, Columns, columns_of, fitting, utilisation
from subfleet.search.query import Fit, Query

__all__ = ["EstimateIndex"]

Identity = tuple[object, ...]

_PARAMETERS, _WEIGHT_BYTES, _UPDATE_BYTES, _FORWARD_MACS, _FIRST_TARGET = range(5)


class EstimateIndex:
    """Every known submodel once, in the order in which it became known.

    A look-up reads a few columns of 8 bytes a submodel from end to end: for some thousands of submodels that takes less
    time than a tree of many dimensions takes to walk, and nothing has to be kept in balance.

    Args:
        targets: program targets that cost estimates are needed for.
        candidates: known from the start.
    """

    def __init__(self, targets: Sequence[str], candidates: Iterable[Candidate] = ()) -> None:
        self._targets = tuple(targets)
        self._candidates: list[Candidate] = []
        self._known: set[Identity] = set()
        self._table = np.zeros((_FIRST_TARGET + len(self._targets), 64), dtype=np.int64)
        for candidate in candidates:
            self.add(candidate)

    def copied(self) -> "EstimateIndex":
        """The same submodels, to which others may be added."""
        copy = EstimateIndex(self._targets)
        copy._candidates, copy._known, copy._table = [*self._candidates], {*self._known}, self._table.copy()
        return copy

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __contains__(self, architecture: Architecture) -> bool:
        return _identity(architecture) in self._known

    def add(self, candidate: Candidate) -> bool:
        """Remember a submodel; False where it is known already."""
        if candidate.architecture in self:
            return False
        row = len(self._candidates)
        if row == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        memory = [candidate.training_memory_bytes.get(name, UNTRAINABLE_BYTES) for name in self._targets]
        moved = (candidate.weight_bytes, candidate.update_bytes)
        self._table[:, row] = [candidate.parameters, *moved, candidate.forward_macs, *memory]
        self._candidates.append(candidate)
        self._known.add(_identity(candidate.architecture))
        return True

    def best(self, query: Query) -> Fit | None:
        """The known submodel that fits and has the most parameters; None where none fits.

        Of as many parameters the higher utilisation wins, then identity, so that the answer does not depend on what
        became known first.
        """
        columns = self._columns(query.target)
        rows = np.flatnonzero(_fitting(columns, query))
        shares = utilisation(columns, query.limits)
        while len(rows):
            top = rows
            for column in (columns.parameters, shares):
                top = top[column[top] == column[top].max()]
            row = int(max(top, key=lambda place: self._candidates[place].architecture))
            if not query.refused(self._candidates[row]):
                return Fit(candidate=self._candidates[row], utilisation=float(shares[row]))
            rows = rows[rows != row]
        return None

    def around(self, query: Query, most: int) -> tuple[list[Candidate], list[Candidate]]:
        """Known submodels from which to look for larger ones.

        Returns:
            At most so many that fit, those with the most parameters first; and as many that do not, with more
            parameters than these, those first that are the least beyond the budget.
        """
        columns = self._columns(query.target)
        fits = _fitting(columns, query)
        within = np.flatnonzero(fits)
        within = within[np.argsort(-columns.parameters[within], kind="stable")][:most]
        least = columns.parameters[within[0]] if len(within) else 0
        beyond = np.flatnonzero(~fits & (columns.parameters > least))
        excess = np.maximum(utilisation(columns, query.limits), _compute_fraction(columns, query))
        beyond = beyond[np.argsort(excess[beyond], kind="stable")][:most]
        every = ([self._candidates[row] for row in rows] for rows in (within, beyond))
        return next(every), next(every)

    def stands_in(self, candidate: Candidate, query: Query, slack: float) -> bool:
        """Whether something known takes no more of anything that the query limits, and lacks at most a few parameters.

        Args:
            candidate: what may be stood in for.
            query: tells the target, and whether multiply-accumulates are limited.
            slack: fraction of its parameters that may be lacking.
        """
        columns, other = self._columns(query.target), columns_of(candidate, query.target)
        near = columns.parameters >= (1 - slack) * candidate.parameters
        near &= columns.memory_bytes <= other.memory_bytes
        near &= (columns.weight_bytes <= other.weight_bytes) & (columns.update_bytes <= other.update_bytes)
        if query.limits.forward_macs is not None:
            near &= columns.forward_macs <= other.forward_macs
        return bool(near.any())

    def _columns(self, target: str) -> Columns:
        held = self._table[:, : len(self._candidates)]
        known = target in self._targets
        return Columns(
            parameters=held[_PARAMETERS],
            weight_bytes=held[_WEIGHT_BYTES],
            update_bytes=held[_UPDATE_BYTES],
            forward_macs=held[_FORWARD_MACS],
            memory_bytes=held[_FIRST_TARGET + self._targets.index(target)]
            if known
            else np.full(len(self._candidates), UNTRAINABLE_BYTES),
        )


def _fitting(columns: Columns, query: Query) -> NDArray[np.bool_]:
    fits = fitting(columns, query.limits)
    return fits if query.below_parameters is None else fits & (columns.parameters < query.below_parameters)


def _compute_fraction(columns: Columns, query: Query) -> NDArray[np.float64]:
    limit = query.limits.forward_macs
    return np.zeros(len(columns.forward_macs)) if limit is None else columns.forward_macs / max(limit, 1)


def _identity(architecture: Architecture) -> Identity:
    """Equal for equal submodels whatever they are called, as their ids are, but found without a digest."""
    return architecture.axes, architecture.blocks, architecture.choices
