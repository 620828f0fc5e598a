"""Exact weighted averaging of what subnets learned.

What clients send is a change: trained minus received. Each element of the full model moves by the weighted mean of the
changes of those who held it, and stays bit-identical where nobody held it or where the mean is exactly 0.

Floating-point sums depend on their order; sums of integers do not. Before the first update every tensor gets a grid of
a power of two, from the starting model and the announced total weight alone. Each client's weighted change is rounded
to this grid once and then summed as int64, so every order and every grouping of clients gives the same bits:

    units_c = weight_c * 2^(62 - W)                   total weight <= 2^W
    sum     = sum_c round(change_c * units_c * 2^-L)  |change| <= 2^L = 2^20 * max(1, largest weight of the tensor)
    new     = old + sum / sum_c units_c * 2^L         where anybody held the element

With all of the weight on an element, the grid is 2^(L - 62): for weights below 1 that is 2e-13, a 250 000th of the
spacing of float32 numbers near 1. No sum can reach 2^63.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Accumulator"]

_GRID_BITS = 62
_HEADROOM_BITS = 20
_MAX_TOTAL_WEIGHT = 2.0**64


@dataclass(slots=True, kw_only=True, eq=False)
class _Share:
    """All that was added under one subnet: its maps, its shapes and the sum of its clients' weight units."""

    maps: Mapping[str, TensorMap]
    shapes: Mapping[str, tuple[int, ...]]
    units: int


class Accumulator:
    """Sums one round's changes into the memory of one model (int64), however many clients there are.

    Attributes:
        network: the declaration.
        state: the full model that the round started from; it is read again by `finish` and never written.
        total_weight: at least the sum of all weights that will be added; above 0 and at most 2^64.

    Raises:
        ConfigError: the state is not the network's, is not finite, or the total weight is out of range.
    """

    def __init__(self, network: Network, state: Mapping[str, Tensor], *, total_weight: float) -> None:
        if not 0 < total_weight <= _MAX_TOTAL_WEIGHT:
            raise ConfigError(f"total_weight is {total_weight}, but must be above 0 and at most 2^64")
        _check_state(network, state)
        self.network = network
        self.state = dict(state)
        self.total_weight = total_weight
        # frexp gives the smallest power of two above its argument.
        self._weight_exponent = math.frexp(total_weight)[1]
        self._max_units = self._units(total_weight)
        self._limit_exponents = {name: _limit_exponent(name, tensor) for name, tensor in self.state.items()}
        self._sums = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in self.state.items()}
        self._shares: dict[str, _Share] = {}

    def add(self, spec: SubnetSpec, change: Mapping[str, Tensor], weight: float) -> None:
        """Add what one client learned. On any error nothing has been added.

        Args:
            spec: the subnet that it trained.
            change: trained minus received, by name, for exactly the subnet's tensors.
            weight: its share, such as its number of samples; 0 or more. With 0 it is checked and has no effect.

        Raises:
            ConfigError: the spec is no subnet of this network.
            ProtocolError: tensors are missing, unexpected, of a wrong shape or type, not finite or far too large; or
                the weight is negative, not finite, or takes the sum of weights above the announced total.
        """
        share = self._shares.get(spec.spec_id)
        if share is None:
            share = _Share(maps=tensor_maps(self.network, spec), shapes=self.network.shapes(spec), units=0)
        units = self._checked_units(weight)
        self._check_change(share, change)
        for name, tensor_map in share.maps.items():
            factor = math.ldexp(units, -self._limit_exponents[name])
            target = self._sums[name]
            weighted = change[name].to(target.device, torch.float64) * factor
            tensor_map.scatter(weighted.round_().to(torch.int64), target)
        share.units += units
        self._shares[spec.spec_id] = share

    def merge(self, other: "Accumulator") -> None:
        """Add everything that another accumulator of the same round holds; the other one stays as it is.

        Raises:
            ConfigError: the other one has another network, starting model or total weight.
            ProtocolError: together they exceed the announced total weight.
        """
        if not self._same_round(other):
            raise ConfigError(
                "two accumulators differ in network, starting model or total weight; merge those of one round only"
            )
        sums, shares = other._sums, other._shares  # noqa: SLF001 - of the same class
        self._check_total(sum(share.units for share in shares.values()))
        for name, tensor in sums.items():
            self._sums[name] += tensor
        for spec_id, share in shares.items():
            mine = self._shares.setdefault(spec_id, _Share(maps=share.maps, shapes=share.shapes, units=0))
            mine.units += share.units

    def finish(self) -> dict[str, Tensor]:
        """The new full model. It shares no memory with the old one, and more may still be added afterwards."""
        return {name: self._finish_one(name) for name in self.state}

    def _finish_one(self, name: str) -> Tensor:
        old, total = self.state[name], self._sums[name]
        units = torch.zeros_like(total)
        for share in self._shares.values():
            if name in share.maps:
                share.maps[name].scatter(total.new_full(share.shapes[name], share.units), units)
        # A sum of exactly 0 is left out as well: -0.0 + 0.0 would not be -0.0.
        moved = (units > 0) & (total != 0)
        mean = total.to(torch.float64) / units.clamp(min=1).to(torch.float64)
        new = (old.to(torch.float64) + mean * math.ldexp(1.0, self._limit_exponents[name])).to(old.dtype)
        return torch.where(moved, new, old)

    def _units(self, weight: float) -> int:
        return round(math.ldexp(weight, _GRID_BITS - self._weight_exponent))

    def _checked_units(self, weight: float) -> int:
        if not 0 <= weight < math.inf:
            raise ProtocolError(f"the weight of an update is {weight}, but must be a finite number of 0 or more")
        units = self._units(weight)
        self._check_total(units)
        return units

    def _check_total(self, more_units: int) -> None:
        units = more_units + sum(share.units for share in self._shares.values())
        # Weights such as 0.1 are no binary fractions: ten of them may sum to a hair above 1.
        if units > self._max_units + (self._max_units >> 20):
            scale = math.ldexp(1.0, self._weight_exponent - _GRID_BITS)
            raise ProtocolError(
                f"the weights add up to {units * scale}, but {self._max_units * scale} was announced as their total"
            )

    def _check_change(self, share: _Share, change: Mapping[str, Tensor]) -> None:
        if change.keys() != share.shapes.keys():
            missing, unknown = sorted(share.shapes.keys() - change.keys()), sorted(change.keys() - share.shapes.keys())
            raise ProtocolError(f"an update lacks the tensors {missing} and has the unknown tensors {unknown}")
        for name, shape in share.shapes.items():
            tensor = change[name]
            if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
                raise ProtocolError(
                    f"tensor {name!r} of an update is {tensor.dtype} {tuple(tensor.shape)}, but must be float {shape}"
                )
            limit = math.ldexp(1.0, self._limit_exponents[name])
            largest = tensor.abs().max().item()
            # Stated so that NaN, which max() hands on, fails it too.
            if not largest <= limit:
                raise ProtocolError(
                    f"tensor {name!r} of an update holds a change of {largest}, but must be finite and {limit} at most"
                )

    def _same_round(self, other: "Accumulator") -> bool:
        return (
            self.network.config == other.network.config
            and self.total_weight == other.total_weight
            and all(torch.equal(tensor, other.state[name]) for name, tensor in self.state.items())
        )


def _check_state(network: Network, state: Mapping[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    declared = {name: decl.shape for name, decl in network.tensors.items()}
    if found != declared:
        wrong = sorted(name for name in found.keys() | declared.keys() if found.get(name) != declared.get(name))
        raise ConfigError(f"the model differs from its network in the names or shapes of the tensors {wrong}")


def _limit_exponent(name: str, tensor: Tensor) -> int:
    largest = tensor.abs().max().item()
    if not tensor.dtype.is_floating_point or not largest < math.inf:
        raise ConfigError(f"tensor {name!r} of the model is {tensor.dtype} up to {largest}, but must be finite floats")
    return _HEADROOM_BITS + max(0, math.frexp(largest)[1])
