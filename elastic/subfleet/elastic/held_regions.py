"""Weights and client counts of the elements of a tensor, stored by region instead of by element."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.maps import Gather, TensorMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRegion:
    """The elements of a tensor that a map reads and writes.

    Attributes:
        key: equal for maps of the same elements in the same order.
        map: map from the full tensor to the local one.
        local_shape: shape of the local tensor.
        whole: whether the map is the identity.
        is_view: whether `map.extract` shares memory with the full tensor.
    """

    key: Hashable
    map: TensorMap
    local_shape: tuple[int, ...]
    whole: bool
    is_view: bool


def make_region(tensor_map: TensorMap, shape: tuple[int, ...]) -> HeldRegion:
    """The region of a map in a tensor with this shape."""
    key: Hashable = id(tensor_map)
    sliced = False
    if isinstance(tensor_map, Gather):
        sliced = all(isinstance(index, slice) for index in tensor_map.index)
        key = (tensor_map.unfolded, *(_index_key(index) for index in tensor_map.index))
    # A tensor with this shape that takes no memory.
    local_shape = tuple(tensor_map.extract(torch.zeros(()).expand(shape)).shape)
    is_view = sliced and isinstance(tensor_map, Gather) and tensor_map.unfolded is None
    return HeldRegion(
        key=key, map=tensor_map, local_shape=local_shape, whole=sliced and local_shape == shape, is_view=is_view
    )


def _index_key(index: slice | Tensor) -> Hashable:
    # A range equals no tuple: the slice 0:2 differs from the indices 0 and 2.
    return range(index.start, index.stop) if isinstance(index, slice) else tuple(index.reshape(-1).tolist())


class HeldRegions:
    """Sums of weight units and client counts for one tensor.

    All clients of a region share one pair of numbers. Clients with a weight for each element are added to arrays of the
    tensor's size, which are created for the first such client.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._regions: dict[Hashable, tuple[HeldRegion, int, int]] = {}
        self._arrays: tuple[Tensor, Tensor] | None = None

    def add(self, region: HeldRegion, units: int | Tensor, clients: int = 1) -> None:
        """Add clients of a region by their summed units, or one client by int64 units that broadcast to its shape."""
        if isinstance(units, int):
            _, old_units, old_clients = self._regions.get(region.key, (region, 0, 0))
            self._regions[region.key] = (region, old_units + units, old_clients + (clients if units else 0))
            return
        if self._arrays is None:
            self._arrays = self._zeros(), self._zeros()
        local = units.to(self._device).expand(region.local_shape)
        region.map.scatter(local, self._arrays[0])
        region.map.scatter((local > 0).to(torch.int64), self._arrays[1])

    def merge(self, other: "HeldRegions") -> None:
        """Add the sums of other regions of the same tensor."""
        for region, units, clients in other._regions.values():  # noqa: SLF001 - of the same class
            self.add(region, units, clients)
        if other._arrays is not None:  # noqa: SLF001
            self._arrays = self._arrays or (self._zeros(), self._zeros())
            for mine, more in zip(self._arrays, other._arrays, strict=True):  # noqa: SLF001
                mine.add_(more)

    def shared_units_and_clients(self) -> tuple[int, int] | None:
        """Units and clients that all elements share; None if a client held a part, or weights differ within it."""
        if self._arrays is not None or not all(region.whole for region, _, _ in self._regions.values()):
            return None
        return self._whole_units_and_clients()

    def units_and_clients(self) -> tuple[Tensor, Tensor]:
        """Units and clients of each element, int64; they take no memory if all elements are alike."""
        units, clients = (
            torch.tensor(count, device=self._device).expand(self._shape) for count in self._whole_units_and_clients()
        )
        if self.shared_units_and_clients() is not None:
            return units, clients
        units, clients = units.clone(), clients.clone()
        for region, region_units, region_clients in self._regions.values():
            if not region.whole:
                region.map.scatter(units.new_full(region.local_shape, region_units), units)
                region.map.scatter(units.new_full(region.local_shape, region_clients), clients)
        if self._arrays is not None:
            units += self._arrays[0]
            clients += self._arrays[1]
        return units, clients

    def _whole_units_and_clients(self) -> tuple[int, int]:
        whole = [(units, clients) for region, units, clients in self._regions.values() if region.whole]
        return sum(units for units, _ in whole), sum(clients for _, clients in whole)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._shape, dtype=torch.int64, device=self._device)
