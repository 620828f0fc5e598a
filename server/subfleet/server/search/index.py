"""Priced subnets as columns of numbers, so that all of them are held against a budget at once."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.assignment import Candidate
from subfleet.server.search.limits import INFINITE_BYTES, Columns, fitting, utilisation
from subfleet.server.search.query import Fit, Query

__all__ = ["PriceIndex"]

Identity = tuple[object, ...]

_PARAMETERS, _WEIGHT_BYTES, _UPDATE_BYTES, _FORWARD_MACS, _FIRST_TARGET = range(5)


class PriceIndex:
    """Every known subnet once, in the order in which it became known.

    A look-up reads a few columns of 8 bytes a subnet from end to end: for some thousands of subnets that takes less
    time than a tree of many dimensions takes to walk, and nothing has to be kept in balance.

    Args:
        targets: program targets that prices are needed for.
        candidates: known from the start.
    """

    def __init__(self, targets: Sequence[str], candidates: Iterable[Candidate] = ()) -> None:
        self._targets = tuple(targets)
        self._candidates: list[Candidate] = []
        self._known: set[Identity] = set()
        self._table = np.zeros((_FIRST_TARGET + len(self._targets), 64), dtype=np.int64)
        for candidate in candidates:
            self.add(candidate)

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __contains__(self, spec: SubnetSpec) -> bool:
        return _identity(spec) in self._known

    def add(self, candidate: Candidate) -> bool:
        """Remember a subnet; False where it is known already."""
        if candidate.spec in self:
            return False
        row = len(self._candidates)
        if row == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        memory = [
            min(candidate.training_memory_bytes.get(name, INFINITE_BYTES), INFINITE_BYTES) for name in self._targets
        ]
        moved = (candidate.weight_bytes, candidate.update_bytes)
        self._table[:, row] = [candidate.parameters, *moved, candidate.forward_macs, *memory]
        self._candidates.append(candidate)
        self._known.add(_identity(candidate.spec))
        return True

    def best(self, query: Query, *, goal: float = 0.0, floor: float = 0.0) -> Fit | None:
        """The best known subnet that fits; None where none does.

        Utilisation counts up to the goal. Among subnets that are equal in it the most parameters win, then the most
        multiply-accumulates: a goal of 0 asks for the largest subnet, a goal of 1 for the one that leaves least unused.

        Args:
            query: of the device.
            goal: 0 to 1.
            floor: least utilisation of the answer.
        """
        columns = self._columns(query.target)
        fits = fitting(columns, query.limits)
        if query.below_parameters is not None:
            fits &= columns.parameters < query.below_parameters
        shares = utilisation(columns, query.limits)
        rows = np.flatnonzero(fits & (shares >= floor))
        while len(rows):
            counted = np.minimum(shares[rows], goal)
            top = rows[counted == counted.max()]
            for column in (columns.parameters, columns.forward_macs):
                top = top[column[top] == column[top].max()]
            # Identity decides the rest, so that the answer does not depend on what became known first.
            row = (
                int(top[0]) if len(top) == 1 else int(max(top, key=lambda place: self._candidates[place].spec.spec_id))
            )
            if not query.refused(self._candidates[row]):
                return Fit(candidate=self._candidates[row], utilisation=float(shares[row]))
            rows = rows[rows != row]
        return None

    def _spec_id(self, row: int) -> str:
        return self._candidates[row].spec.spec_id

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
            else np.full(len(self._candidates), INFINITE_BYTES),
        )


def _identity(spec: SubnetSpec) -> Identity:
    """Equal for equal subnets whatever they are called, as their ids are, but found without a digest."""
    return spec.axes, spec.blocks, spec.choices
