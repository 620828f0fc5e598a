"""What clients learned, checked against their submodels; where it is added to a model, and how much at a time."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import ADDED_TOGETHER
from subfleet.elastic.grid import WeightGrid
from subfleet.elastic.holders import HeldSubmodel
from subfleet.elastic.maps import Gather, Placement, TensorMap, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.sum_layout import Numbers, SumLayout
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.submodel import Architecture

_MOST_PLACES = 32
"""So many submodels are kept, with their places, from one update to the next."""
BATCH_BYTES = 3 * 2**27
"""Float32 changes that are worth having in memory to be added together.

Sums take twice the bytes of an update, and are read and written once for a batch.
"""


def split_batches(parameter_counts: Sequence[int]) -> Iterator[slice]:
    """Split updates into batches that are added together: as many as `BATCH_BYTES` hold, but at least `ADDED_TOGETHER`.

    Args:
        parameter_counts: of each update.
    """
    start, size_bytes = 0, 0
    for position, count in enumerate(parameter_counts):
        if position - start >= ADDED_TOGETHER and size_bytes + 4 * count > BATCH_BYTES:
            yield slice(start, position)
            start, size_bytes = position, 0
        size_bytes += 4 * count
    if start < len(parameter_counts):
        yield slice(start, len(parameter_counts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What one client learned.

    Attributes:
        architecture: the submodel that it trained.
        change: trained minus received, by name, for exactly the submodel's tensors, or those in `sent`.
        weight: its weight, such as its number of samples; at least 0. With 0 the change is checked and has no effect.
        placements: where its tensors are added, each tensor of the model at most once; None adds every tensor to the
            one with its name.
        factors: factors of the weight by name of the full model's tensor, from 0 to 1; a tensor broadcasts against the
            local one, such as (classes, 1) for the rows of a head.
        sent: names of the submodel's tensors in the change if it lacks some; placements only name these.
    """

    architecture: Architecture
    change: Mapping[str, Tensor]
    weight: float
    placements: Sequence[Placement] | None = None
    factors: Mapping[str, float | Tensor] | None = None
    sent: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What a contribution adds to each tensor of a model.

    Attributes:
        held: what its submodel holds.
        values: by name of the model's tensor.
        units: (tensors of the layout,): those of tensors that have rows and that the client weighs as a whole; else 0.
        element_units: int64 units of each element of other tensors, in the shape of their values.
    """

    held: HeldSubmodel
    values: Mapping[str, Tensor]
    units: Numbers
    element_units: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placed:
    """A submodel, or other placements of its tensors.

    Attributes:
        shapes: of the submodel's tensors.
        local: the submodel's tensor that is added to each tensor of the model.
        held: what it holds.
    """

    shapes: Mapping[str, tuple[int, ...]]
    local: Mapping[str, str]
    held: HeldSubmodel


class ContributionReader:
    """Reads the contributions of a round.

    Args:
        network: the network.
        layout: of the tensors that are aggregated.
        grid: of the weights.
    """

    def __init__(self, network: Network, layout: SumLayout, grid: WeightGrid) -> None:
        self._network = network
        self._layout = layout
        self._grid = grid
        self._placed: dict[str, _Placed] = {}

    def read(self, contribution: Contribution) -> Reading:
        """Check a contribution and find where it is added; errors are those of `Accumulator.add_many`."""
        placed = self._place(contribution)
        change, shapes = contribution.change, placed.shapes
        sent = set(contribution.sent or shapes)
        _check_names(change, sent)
        unsent = set(placed.local.values()) - sent
        if unsent:
            raise ConfigError(f"an update is placed with the tensors {sorted(unsent)}, but does not send them")
        values = {name: change[local] for name, local in placed.local.items()}
        for tensor, local in zip(values.values(), placed.local.values(), strict=True):
            if tensor.shape != shapes[local] or not tensor.dtype.is_floating_point:
                raise ProtocolError(
                    f"tensor {local!r} of an update is {tensor.dtype} {tuple(tensor.shape)}, but must be float "
                    f"{shapes[local]}"
                )
        weighed, held = self._grid.units(contribution.weight), placed.held
        units = held.has_rows * weighed
        element_units = {name: torch.tensor(weighed) for name in held.without_rows}
        for name in (contribution.factors or {}).keys() & values.keys():
            own = self._multiply_units(name, contribution, values[name].shape)
            if name in element_units or isinstance(own, Tensor):
                element_units[name] = torch.as_tensor(own)
            units[self._layout.places[name].position] = 0 if name in element_units else own
        element_units = {name: each.expand(values[name].shape) for name, each in element_units.items()}
        return Reading(held=held, values=values, units=units, element_units=element_units)

    def _place(self, contribution: Contribution) -> _Placed:
        architecture = contribution.architecture
        key = architecture.architecture_id
        placed = self._placed.get(key)
        if placed is None:
            if len(self._placed) >= _MOST_PLACES:  # each client may have a submodel of its own
                self._placed.clear()
            shapes, maps = self._network.shapes(architecture), tensor_maps(self._network, architecture)
            placed = self._placed[key] = self._hold(shapes, dict(zip(maps, maps, strict=True)), maps, key)
        if contribution.placements is None:
            return placed
        _check_placements(self._network, placed.shapes, contribution.placements)
        local = {placement.name: placement.local for placement in contribution.placements}
        maps = {placement.name: placement.map for placement in contribution.placements}
        return self._hold(placed.shapes, local, maps, object())

    def _hold(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        local: Mapping[str, str],
        maps: Mapping[str, TensorMap],
        key: Hashable,
    ) -> _Placed:
        names = [name for name in local if name in self._layout.places]
        held = HeldSubmodel(key=key, layout=self._layout, maps={name: maps[name] for name in names})
        return _Placed(shapes=shapes, local={name: local[name] for name in names}, held=held)

    def _multiply_units(self, name: str, contribution: Contribution, shape: Sequence[int]) -> int | Tensor:
        factor, weight = (contribution.factors or {})[name], contribution.weight
        inside = ((factor >= 0) & (factor <= 1)).all() if isinstance(factor, Tensor) else 0 <= factor <= 1
        if not inside:
            raise ProtocolError(f"the weight of tensor {name!r} of an update has a factor that is not between 0 and 1")
        if not isinstance(factor, Tensor):
            return self._grid.units(weight * factor)
        try:
            factor.expand(shape)
        except RuntimeError as error:
            raise ProtocolError(
                f"the factor of tensor {name!r} has the shape {tuple(factor.shape)}, but must broadcast to "
                f"{tuple(shape)}"
            ) from error
        return self._grid.element_units(weight, factor)


def _check_names(change: Mapping[str, Tensor], names: Set[str]) -> None:
    if change.keys() != names:
        missing, unknown = sorted(names - change.keys()), sorted(change.keys() - names)
        raise ProtocolError(f"an update lacks the tensors {missing} and has the unknown tensors {unknown}")


def _check_placements(network: Network, shapes: Mapping[str, tuple[int, ...]], placements: Sequence[Placement]) -> None:
    names = [placement.name for placement in placements]
    unknown = [
        placement for placement in placements if placement.local not in shapes or placement.name not in network.tensors
    ]
    if unknown:
        raise ConfigError(
            f"a placement adds the submodel's tensor {unknown[0].local!r} to {unknown[0].name!r}, but one of them does "
            "not exist"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two placements of one update add to the tensor {twice!r}, but each must have its own")
    for placement in placements:
        own, shape, size = placement.map, shapes[placement.local], math.prod(network.tensors[placement.name].shape)
        if isinstance(own, Gather) and (own.local_shape != shape or math.prod(own.sizes) != size):
            raise ConfigError(
                f"a placement maps {size} elements of {placement.name!r} to {placement.local!r} of shape {shape}, but "
                f"its map is for {math.prod(own.sizes)} and {own.local_shape}"
            )
