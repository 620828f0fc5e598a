"""Exact weighted averaging of what submodels learned.

Clients send a change: trained minus received. Each element of the full model moves by the weighted mean of the changes
of the clients that held it. It stays bit-identical if too few held it or the mean is exactly 0. Weighted changes are
rounded to a grid that is fixed before the first update, and summed as integers (`subfleet.elastic.grid`). Every order
and grouping of clients therefore gives the same bits, on the CPU and on a GPU.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.exact_sums import Move, Term, add_exactly, move_tensors
from subfleet.elastic.grid import WeightGrid, limit_exponent
from subfleet.elastic.held_regions import HeldRegion, HeldRegions, make_region
from subfleet.elastic.maps import Placement, placements
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.submodel import Architecture

_MOST_PLACES = 32
"""Submodels with places in the tensors that are kept from one update to the next."""


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
class _TensorContribution:
    """The part of a contribution that is added to one tensor."""

    name: str
    region: HeldRegion
    values: Tensor
    units: int | Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TensorPlacement:
    """A placement in a tensor of the state."""

    local: str
    name: str
    region: HeldRegion


class Accumulator:
    """Sums one round's changes into the memory of one model (int64), however many clients there are.

    It works on the device of the state's tensors and moves updates there, one batch at a time.

    Attributes:
        network: the network.
        state: the full model at the start of the round, or some of its tensors; only these are aggregated. `finish`
            reads it again; it is never written.
        min_contributors: number of clients with a weight above 0 that must hold an element for it to move; FedorAS's
            operator-wise averaging takes 2 (section 3.4, equation 5).

    Args:
        largest: the largest absolute change of a tensor in all contributions, where it is known; sums are the more
            precise then. A larger change is refused.

    Raises:
        ConfigError: the state does not match the network or is not finite, or the total weight is not above 0 and at
            most 2^64. It must be at least the sum of all weights that will be added.
    """

    def __init__(
        self,
        network: Network,
        state: Mapping[str, Tensor],
        *,
        total_weight: float,
        min_contributors: int = 1,
        largest: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if min_contributors < 1:
            raise ConfigError(f"min_contributors is {min_contributors}, but must be 1 or more")
        _check_state(network, state)
        self.network = network
        self.state = {name: tensor.detach() for name, tensor in state.items()}
        self.min_contributors = min_contributors
        self._grid = WeightGrid(total_weight)
        self._limit_exponents = {
            name: limit_exponent(name, tensor, largest.get(name)) for name, tensor in self.state.items()
        }
        self._units = 0
        self._sums = _zero_sums(self.state)
        self._regions = {
            name: HeldRegions(
                tuple(tensor.shape), tensor.device, fixed_dims=_count_fixed_dims(network.tensors[name].factors)
            )
            for name, tensor in self.state.items()
        }
        self._own_places: dict[str, tuple[Mapping[str, tuple[int, ...]], Sequence[_TensorPlacement]]] = {}

    @property
    def total_weight(self) -> float:
        """The announced upper bound of the sum of all weights."""
        return self._grid.total_weight

    def add(
        self,
        architecture: Architecture,
        change: Mapping[str, Tensor],
        weight: float,
        *,
        placements: Sequence[Placement] | None = None,
        factors: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Add one contribution; see `Contribution` for the arguments and `add_many` for errors."""
        contribution = Contribution(
            architecture=architecture, change=change, weight=weight, placements=placements, factors=factors
        )
        self.add_many([contribution])

    def add_many(self, contributions: Sequence[Contribution]) -> None:
        """Add several contributions in one pass over the sums. On any error nothing is added.

        Raises:
            ConfigError: an architecture is not a submodel of this network, or placements name an unknown tensor or one
                tensor twice.
            ProtocolError: tensors are missing, unexpected, of a wrong shape or type, not finite or far too large; a
                weight or factor is out of range; or the weights exceed the announced total. To find the contribution
                at fault, add them one by one.
        """
        units = self._units + sum(self._grid.units(contribution.weight) for contribution in contributions)
        self._grid.check_total(units)
        parts: dict[str, list[_TensorContribution]] = {}
        for contribution in contributions:
            for part in self._parts(contribution):
                parts.setdefault(part.name, []).append(part)
        add_exactly([[self._term(part) for part in added] for added in parts.values()])
        self._units = units
        for name, added in parts.items():
            for part in added:
                self._regions[name].add(part.region, part.units)

    def merge(self, other: "Accumulator") -> None:
        """Add the sums of another accumulator of the same round, which stays unchanged.

        Raises:
            ConfigError: the network, starting model, total weight or minimum of contributors differ.
            ProtocolError: together they exceed the announced total weight.
        """
        if not self._same_round(other):
            raise ConfigError(
                "two accumulators differ in network, starting model, total weight or minimum of contributors; only "
                "accumulators of one round can be merged"
            )
        units = self._units + other._units  # noqa: SLF001 - of the same class
        self._grid.check_total(units)
        self._units = units
        for name, total in self._sums.items():
            total.add_(other._sums[name])  # noqa: SLF001
            self._regions[name].merge(other._regions[name])  # noqa: SLF001

    def finish(self) -> dict[str, Tensor]:
        """Compute the new model. It shares no memory with the old one; more updates may be added afterwards."""
        moves = {
            name: Move(
                old=old.contiguous(),
                total=self._sums[name],
                regions=self._regions[name],
                min_clients=self.min_contributors,
                scale=math.ldexp(1.0, self._limit_exponents[name]),
            )
            for name, old in self.state.items()
        }
        return move_tensors(moves)

    def find_held(self) -> dict[str, Tensor]:
        """Bool masks of the elements that enough clients with a weight above 0 hold, even if their mean change is 0."""
        return {
            name: regions.units_and_clients()[1] >= self.min_contributors for name, regions in self._regions.items()
        }

    def _parts(self, contribution: Contribution) -> list[_TensorContribution]:
        shapes, placements = self._shapes_and_places(contribution)
        _check_names(contribution.change, contribution.sent or shapes)
        factors, whole_units = contribution.factors or {}, self._grid.units(contribution.weight)
        parts = []
        for placement in placements:
            shape = placement.region.local_shape
            values = _check_values(placement, contribution.change[placement.local], shape)
            units: int | Tensor = whole_units
            if placement.name in factors:
                units = self._multiply_units(placement.name, contribution.weight, factors[placement.name], shape)
            moved = values.detach().to(self.state[placement.name].device)
            parts.append(_TensorContribution(name=placement.name, region=placement.region, values=moved, units=units))
        return parts

    def _shapes_and_places(
        self, contribution: Contribution
    ) -> tuple[Mapping[str, tuple[int, ...]], Sequence[_TensorPlacement]]:
        architecture = contribution.architecture
        if architecture.architecture_id not in self._own_places:
            whole = self._places(placements(self.network, architecture))
            if len(self._own_places) >= _MOST_PLACES:  # each client may have a submodel of its own
                self._own_places.clear()
            self._own_places[architecture.architecture_id] = self.network.shapes(architecture), whole
        shapes, own = self._own_places[architecture.architecture_id]
        if contribution.placements is None:
            return shapes, own
        _check_placements(self.network, shapes, contribution.placements)
        return shapes, self._places(contribution.placements)

    def _places(self, among: Sequence[Placement]) -> list[_TensorPlacement]:
        return [
            _TensorPlacement(
                local=placement.local,
                name=placement.name,
                region=make_region(placement.map, tuple(self.state[placement.name].shape)),
            )
            for placement in among
            if placement.name in self.state
        ]

    def _multiply_units(self, name: str, weight: float, factor: float | Tensor, shape: tuple[int, ...]) -> int | Tensor:
        inside = ((factor >= 0) & (factor <= 1)).all() if isinstance(factor, Tensor) else 0 <= factor <= 1
        if not inside:
            raise ProtocolError(f"the weight of tensor {name!r} of an update has a factor that is not between 0 and 1")
        if not isinstance(factor, Tensor):
            return self._grid.units(weight * factor)
        try:
            factor.expand(shape)
        except RuntimeError as error:
            raise ProtocolError(
                f"the factor of tensor {name!r} has the shape {tuple(factor.shape)}, but must broadcast to {shape}"
            ) from error
        return self._grid.element_units(weight, factor)

    def _term(self, part: _TensorContribution) -> Term:
        return Term(
            name=part.name,
            total=self._sums[part.name],
            values=part.values,
            factor=self._factor(part),
            limit=math.ldexp(1.0, self._limit_exponents[part.name]),
            region=part.region,
        )

    def _factor(self, part: _TensorContribution) -> float | Tensor:
        exponent = -self._limit_exponents[part.name]
        if isinstance(part.units, int):
            return math.ldexp(part.units, exponent)
        return part.units.to(part.values.device, torch.float64) * math.ldexp(1.0, exponent)

    def _same_round(self, other: "Accumulator") -> bool:
        return (
            self.network.config == other.network.config
            and self.total_weight == other.total_weight
            and self.min_contributors == other.min_contributors
            and self.state.keys() == other.state.keys()
            and self._limit_exponents == other._limit_exponents  # noqa: SLF001
            and all(torch.equal(tensor, other.state[name]) for name, tensor in self.state.items())
        )


def _count_fixed_dims(factors: Sequence[Sequence[str | int]]) -> int:
    """The number of last dimensions that no submodel cuts."""
    fixed = takewhile(lambda dim: len(dim) == 1 and isinstance(dim[0], int), reversed(factors))
    return sum(1 for _ in fixed)


def _check_state(network: Network, state: Mapping[str, Tensor]) -> None:
    declared = {name: decl.shape for name, decl in network.tensors.items()}
    wrong = sorted(name for name, tensor in state.items() if declared.get(name) != tuple(tensor.shape))
    if wrong or not state:
        raise ConfigError(f"names or shapes of the tensors {wrong} differ between the model and its network")


def _zero_sums(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    on_cpu = sum(tensor.numel() for tensor in state.values() if tensor.device.type == "cpu")
    # One NumPy block, because NumPy asks for large pages: touching small pages for the first time takes longer than
    # adding several updates.
    block = torch.from_numpy(np.zeros(on_cpu, dtype=np.int64))
    sums, end = {}, 0
    for name, tensor in state.items():
        if tensor.device.type == "cpu":
            start, end = end, end + tensor.numel()
            sums[name] = block[start:end].view(tensor.shape)
        else:
            sums[name] = torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device)
    return sums


def _check_names(change: Mapping[str, Tensor], expected: Collection[str]) -> None:
    names = set(expected)
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


def _check_values(placement: _TensorPlacement, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
        raise ProtocolError(
            f"tensor {placement.local!r} of an update is {tensor.dtype} {tuple(tensor.shape)}, but must be float "
            f"{shape}"
        )
    return tensor
