"""Weights and client counts of the elements of a tensor, stored by region instead of by element."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import loops_and_threads
from subfleet.elastic.maps import Gather, TensorMap, drop_dims
from subfleet.elastic.region_rows import RegionRows, find_chunk, find_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRegion:
    """The elements of a tensor that a map reads and writes.

    Attributes:
        key: equal for maps of the same elements in the same order.
        map: map from the full tensor to the local one.
        shape: of the tensor.
        local_shape: shape of the local tensor.
        whole: whether the map is the identity.
        is_view: whether `map.extract` shares memory with the full tensor.
    """

    key: Hashable
    map: TensorMap
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    whole: bool
    is_view: bool
    _rows: dict[int, RegionRows] = field(default_factory=dict, repr=False)
    _cells: dict[int, "HeldRegion"] = field(default_factory=dict, repr=False)

    def find_chunk(self, least: int) -> int:
        """The number of elements of whole indices of the tensor's first factor, about `least` if these are small."""
        return find_chunk(getattr(self.map, "unfolded", None) or self.shape, least)

    def find_rows(self, chunk: int) -> RegionRows:
        """The rows of its map, a `Gather`, in chunks of so many elements."""
        if chunk not in self._rows:
            self._rows[chunk] = find_rows(cast("Gather", self.map), self.shape, chunk)
        return self._rows[chunk]

    def keeps_last(self, count: int) -> bool:
        """Whether the map is one of indices that keeps all of the last dimensions."""
        kept = len(self.shape) - count
        return isinstance(self.map, Gather) and self.local_shape[kept:] == self.shape[kept:]

    def drop_dims(self, count: int) -> "HeldRegion":
        """The region of the first dimensions of the tensor; the last ones are not cut."""
        if count and count not in self._cells:
            kept = len(self.shape) - count
            self._cells[count] = make_region(drop_dims(cast("Gather", self.map), count), self.shape[:kept])
        return self._cells[count] if count else self


def make_region(tensor_map: TensorMap, shape: tuple[int, ...]) -> HeldRegion:
    """The region of a map in a tensor with this shape."""
    if not isinstance(tensor_map, Gather):
        local_shape = tuple(tensor_map.extract(torch.zeros(()).expand(shape)).shape)
        return HeldRegion(
            key=id(tensor_map), map=tensor_map, shape=shape, local_shape=local_shape, whole=False, is_view=False
        )
    sliced, local_shape = all(isinstance(index, slice) for index in tensor_map.index), tensor_map.measure_local()
    return HeldRegion(
        key=(tensor_map.unfolded, *map(_index_key, tensor_map.index)),
        map=tensor_map,
        shape=shape,
        local_shape=local_shape,
        whole=sliced and local_shape == shape,
        is_view=sliced and tensor_map.unfolded is None,
    )


def _index_key(index: slice | Tensor) -> Hashable:
    # A range equals no bytes: the slice 0:2 differs from the indices 0 and 2.
    return range(index.start, index.stop) if isinstance(index, slice) else index.numpy().tobytes()


_MOST_REGIONS = 16
"""Regions that are counted together; with more, such as one of each client, their counts are added to arrays."""


class HeldRegions:
    """Sums of weight units and client counts for one tensor.

    All clients of a region share one pair of numbers. Where regions are many, and for clients with a weight for each
    element, they are arrays, with one number for the last dimensions of the tensor if these are never cut.

    Args:
        shape: of the tensor.
        device: of the arrays.
        fixed_dims: number of last dimensions that no region cuts, such as the sides of a kernel.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, fixed_dims: int = 0) -> None:
        self._shape = shape
        self._device = device
        self._fixed_dims = fixed_dims
        self._regions: dict[Hashable, tuple[HeldRegion, int, int]] = {}
        self._arrays: tuple[Tensor, Tensor] | None = None

    def add(self, region: HeldRegion, units: int | Tensor, clients: int = 1) -> None:
        """Add clients of a region by their summed units, or one client by int64 units that broadcast to its shape."""
        if not region.keeps_last(self._fixed_dims):
            self._refine()
        if isinstance(units, int):
            _, old_units, old_clients = self._regions.get(region.key, (region, 0, 0))
            self._regions[region.key] = (region, old_units + units, old_clients + (clients if units else 0))
            if len(self._regions) > _MOST_REGIONS:
                self._arrays = self._count_cells()
                self._regions.clear()
            return
        all_units, all_clients = self._refine()
        local = units.to(self._device).expand(region.local_shape)
        region.map.scatter(local, all_units)
        region.map.scatter((local > 0).to(torch.int64), all_clients)

    def merge(self, other: "HeldRegions") -> None:
        """Add the sums of other regions of the same tensor."""
        for region, units, clients in other._regions.values():  # noqa: SLF001 - of the same class
            self.add(region, units, clients)
        if other._arrays is not None:  # noqa: SLF001
            for mine, more in zip(self._refine(), other._arrays, strict=True):  # noqa: SLF001
                mine.add_(other._expand(more))  # noqa: SLF001

    def _refine(self) -> tuple[Tensor, Tensor]:
        """Let the arrays have a number for each element, and return them."""
        if self._fixed_dims or self._arrays is None:
            units, clients = (self._expand(array).clone() for array in self._arrays or self._make_arrays())
            self._arrays, self._fixed_dims = (units, clients), 0
        return self._arrays

    def shared_units_and_clients(self) -> tuple[int, int] | None:
        """Units and clients that all elements share; None if a client held a part, or weights differ within it."""
        if self._arrays is not None or not all(region.whole for region, _, _ in self._regions.values()):
            return None
        return self._whole_units_and_clients()

    def units_and_clients(self) -> tuple[Tensor, Tensor]:
        """Units and clients of each element, int64; they take no memory if all elements are alike."""
        if self.shared_units_and_clients() is not None:
            units, clients = (torch.tensor(count, device=self._device) for count in self._whole_units_and_clients())
            return units.expand(self._shape), clients.expand(self._shape)
        units, clients = map(self._expand, self._count_cells())
        return units, clients

    def cell_units_and_clients(self) -> tuple[Tensor, Tensor]:
        """The same for each cell of equally many elements, in order.

        A cell is an index of the dimensions that may be cut, or the whole tensor if all elements are alike.
        """
        if (shared := self.shared_units_and_clients()) is not None:
            return torch.tensor([shared[0]]), torch.tensor([shared[1]])
        units, clients = self._count_cells()
        return units.reshape(-1), clients.reshape(-1)

    def _count_cells(self) -> tuple[Tensor, Tensor]:
        whole = self._whole_units_and_clients()
        arrays = self._arrays or self._make_arrays()
        units, clients = (array + count for array, count in zip(arrays, whole, strict=True))
        for region, region_units, region_clients in self._regions.values():
            if not region.whole:
                cells = region.drop_dims(self._fixed_dims)
                self._add_number(units, region_units, cells)
                self._add_number(clients, region_clients, cells)
        return units, clients

    def _add_number(self, cells: Tensor, number: int, region: HeldRegion) -> None:
        loops, _ = loops_and_threads([self._expand(cells)], passes=4)  # for units and clients, region by region
        if loops is None or not isinstance(region.map, Gather):
            region.map.scatter(cells.new_full(region.local_shape, number), cells)
            return
        rows = region.find_rows(region.find_chunk(cells.numel()))
        loops.add_number(cells.numpy().reshape(-1), number, rows.arrays)

    def _whole_units_and_clients(self) -> tuple[int, int]:
        whole = [(units, clients) for region, units, clients in self._regions.values() if region.whole]
        return sum(units for units, _ in whole), sum(clients for _, clients in whole)

    def _make_arrays(self) -> tuple[Tensor, Tensor]:
        shape = self._shape[: len(self._shape) - self._fixed_dims]
        units, clients = (torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in range(2))
        return units, clients

    def _expand(self, cells: Tensor) -> Tensor:
        """A number for each element, without memory of its own."""
        return cells.reshape(*cells.shape, *[1] * self._fixed_dims).expand(self._shape)
