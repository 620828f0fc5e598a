"""The grid of powers of two on which weighted changes are summed exactly.

Floating-point sums depend on their order; sums of integers do not. Before the first update every tensor gets a grid,
from the announced total weight and the largest change of the tensor in any update, measured when updates arrive. Each
client's weighted change is rounded to it once:

    units_c = weight_c * 2^(62 - W), to 29 significant bits        total weight < 2^W
    sum     = sum_c round(change_c * units_c * 2^-L)               |change| <= 2^L
    new     = old + sum / sum_c units_c * 2^L                      where any client held the element

A float32 number has 24 significant bits, so its product with 29 bits is exact in float64, and every machine rounds the
same number. Sample counts below 2^29 are exact weights. If all of the weight is on an element, the grid is 2^(L - 62),
and with a fraction f of it 2^(L - 62) / f: what some clients claim as their weight takes little from the others. No sum
can reach 2^63. Where the largest change is unknown, 2^L is 2^20 * max(1, largest weight).
"""

import math

import numpy as np
import torch
from torch import Tensor

from subfleet.protocol.errors import ConfigError, ProtocolError

_GRID_BITS = 62
_HEADROOM_BITS = 20
_WEIGHT_BITS = 29
_MAX_TOTAL_WEIGHT = 2.0**64


class WeightGrid:
    """Converts weights to integer units; the units of all clients together stay below 2^62.

    Attributes:
        total_weight: upper bound of the sum of all weights of a round; above 0 and at most 2^64.

    Raises:
        ConfigError: the total weight is out of range.
    """

    def __init__(self, total_weight: float) -> None:
        if not 0 < total_weight <= _MAX_TOTAL_WEIGHT:
            raise ConfigError(f"total_weight is {total_weight}, but must be above 0 and at most 2^64")
        self.total_weight = total_weight
        # frexp gives the smallest power of two above its argument.
        self._scale_exponent = _GRID_BITS - math.frexp(total_weight)[1]
        # Weights such as 0.1 are no binary fractions: ten of them may sum to a hair above 1.
        units = self.units(total_weight)
        self._max_units = units + (units >> 20)

    def units(self, weight: float) -> int:
        """Convert the weight of an update to units.

        Raises:
            ProtocolError: the weight is negative or not finite.
        """
        if not 0 <= weight < math.inf:
            raise ProtocolError(f"the weight of an update is {weight}, but must be a finite number of 0 or more")
        mantissa, exponent = math.frexp(weight)
        shift = exponent + self._scale_exponent - _WEIGHT_BITS
        significant = round(math.ldexp(mantissa, _WEIGHT_BITS + min(shift, 0)))
        return significant << max(shift, 0)

    def element_units(self, weight: float, factors: Tensor) -> Tensor:
        """Convert a weight times factors from 0 to 1; int64 on the CPU with the shape of the factors."""
        mantissas, exponents = np.frexp(weight * factors.to("cpu", torch.float64).numpy())
        shifts = exponents.astype(np.int64) + (self._scale_exponent - _WEIGHT_BITS)
        significant = np.rint(np.ldexp(mantissas, _WEIGHT_BITS + np.minimum(shifts, 0))).astype(np.int64)
        return torch.from_numpy(np.asarray(significant << np.maximum(shifts, 0)))

    def check_total(self, units: int) -> None:
        """Check that a sum of units stays within the announced total.

        Raises:
            ProtocolError: it exceeds the total.
        """
        if units > self._max_units:
            weight = math.ldexp(units, -self._scale_exponent)
            raise ProtocolError(f"the weights add up to {weight}, but their announced total is {self.total_weight}")


def limit_exponent(name: str, tensor: Tensor, largest: float | None = None) -> int:
    """The exponent L of a tensor of the starting model; changes of its elements are at most 2^L.

    Args:
        name: of the tensor.
        tensor: of the starting model.
        largest: the largest change in any update; None if that is unknown.

    Raises:
        ConfigError: the tensor does not hold finite floating-point numbers.
    """
    largest_weight = torch.stack(tensor.aminmax()).abs().max().item()
    if not tensor.dtype.is_floating_point or not largest_weight < math.inf:
        raise ConfigError(
            f"tensor {name!r} of the model is {tensor.dtype} up to {largest_weight}, but must be finite floats"
        )
    exponent = _HEADROOM_BITS + max(0, math.frexp(largest_weight)[1])
    return exponent if largest is None else min(exponent, math.frexp(largest)[1])


def largest_change(name: str, tensor: Tensor) -> float:
    """The largest change of an element of a tensor of the starting model that can be summed, 2^L.

    Raises:
        ConfigError: the tensor does not hold finite floating-point numbers.
    """
    return math.ldexp(1.0, limit_exponent(name, tensor))
