"""Weights and client counts of the elements of a model, counted by submodel instead of by element."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import count_cells, loops_for
from subfleet.elastic.maps import Gather, TensorMap
from subfleet.elastic.submodel_rows import SubmodelRows, describe_rows
from subfleet.elastic.sum_layout import Numbers, SumLayout

_MOST_SUBMODELS = 16
"""Submodels that are counted together; with more, such as one of each client, they are added to the cells."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSubmodel:
    """What a submodel holds of the tensors of a layout.

    Attributes:
        key: equal for submodels that hold the same elements.
        layout: the layout.
        maps: by name of the layout's tensor; it may lack some.
    """

    key: Hashable
    layout: SumLayout
    maps: Mapping[str, TensorMap]

    @cached_property
    def rows(self) -> SubmodelRows:
        """Its rows, described when they are first needed."""
        return describe_rows(self.maps, self.layout)

    @cached_property
    def has_rows(self) -> npt.NDArray[np.bool_]:
        """(tensors,): whether rows describe what it holds of a tensor."""
        return np.diff(self.rows.firsts) > 0

    @cached_property
    def with_rows(self) -> tuple[str, ...]:
        """The names of these tensors."""
        return tuple(compress(self.layout.places, self.has_rows))

    @cached_property
    def without_rows(self) -> frozenset[str]:
        """The names of the others that it has."""
        return frozenset(self.maps) - set(self.with_rows)

    @cached_property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """(tensors,): whether it holds all of a tensor."""
        found = (self.maps.get(name) for name in self.layout.places)
        return np.array([isinstance(own, Gather) and own.is_whole for own in found])


class HolderCounts:
    """Sums of weight units, and numbers of clients with any, for each element.

    All clients of a submodel share two numbers for each tensor. Where submodels are many, these are added to a number
    for each cell; where clients weigh the elements of a cell differently, to one for each element.

    Args:
        layout: of the tensors.
        min_clients: the number of clients with units that is asked for later. For one, units tell as much as clients.
    """

    def __init__(self, layout: SumLayout, min_clients: int) -> None:
        self._layout = layout
        self._kinds = 1 if min_clients == 1 else 2
        self._whole = np.zeros((self._kinds, len(layout.places)), np.int64)
        self._submodels: dict[Hashable, tuple[HeldSubmodel, Numbers]] = {}
        self._has_parts = np.zeros(len(layout.places), np.bool_)
        self._cells: Numbers | None = None
        self._elements: dict[str, Tensor] = {}

    def add(self, submodel: HeldSubmodel, units: Numbers, element_units: Mapping[str, Tensor]) -> None:
        """Count a client.

        Args:
            submodel: what it holds.
            units: (tensors,): its units, for tensors that have rows.
            element_units: its int64 units of each element of other tensors.
        """
        self._add(submodel, np.array([units, units > 0][: self._kinds]))
        for name, each in element_units.items():
            shape = self._layout.places[name].shape
            counts = self._elements.setdefault(name, torch.zeros(self._kinds, *shape, dtype=torch.int64))
            for total, own in zip(counts, (each, (each > 0).to(torch.int64)), strict=False):
                submodel.maps[name].scatter(own, total)

    def merge(self, other: "HolderCounts") -> None:
        """Add the counts of the same layout's tensors by other clients."""
        self._whole += other._whole  # noqa: SLF001 - of the same class
        for submodel, counts in other._submodels.values():  # noqa: SLF001
            self._add(submodel, counts)
        if other._cells is not None:  # noqa: SLF001
            self._cells = other._cells + (0 if self._cells is None else self._cells)  # noqa: SLF001
            self._has_parts |= other._has_parts  # noqa: SLF001
        for name, own in other._elements.items():  # noqa: SLF001
            self._elements[name] = own + self._elements.get(name, 0)

    def units_and_clients(self, name: str) -> Tensor:
        """(2, ...): units and clients of a tensor's elements, int64 on the CPU; twice units if one client is enough.

        The dimensions broadcast against the tensor: a number for each element, for each cell, or for all of them. They
        may share memory with what is counted.
        """
        self._count_cells()
        place = self._layout.places[name]
        counts = self._whole[:, place.position, None]
        if self._cells is not None and self._has_parts[place.position]:
            cells = self._cells[:, place.cells]
            counts = (cells + counts if counts.any() else cells).reshape(-1, *place.cell_shape)
        else:
            counts = counts.reshape(-1, *[1] * len(place.shape))
        counted = torch.from_numpy(counts)
        if name in self._elements:
            counted = counted + self._elements[name]
        return counted.expand(2, *counted.shape[1:])

    def _add(self, submodel: HeldSubmodel, counts: Numbers) -> None:
        parts = counts * ~submodel.is_whole
        self._whole += counts - parts
        if parts.any():
            _, earlier = self._submodels.get(submodel.key, (submodel, 0))
            self._submodels[submodel.key] = submodel, earlier + parts
        if len(self._submodels) > _MOST_SUBMODELS:
            self._count_cells()

    def _count_cells(self) -> None:
        if not self._submodels:
            return
        if self._cells is None:
            self._cells = np.zeros((self._kinds, self._layout.cell_count), np.int64)
        loops = loops_for(4 * self._layout.size)  # for several submodels
        count = count_cells if loops is None else loops.count
        for submodel, counts in self._submodels.values():
            for block, numbers in zip(self._cells, counts, strict=True):
                count(block, self._layout.cells, submodel.rows, numbers)
            self._has_parts |= counts[0] > 0
        self._submodels.clear()
