"""The norms that a device calibrates on its own data."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

from subfleet.protocol.bounds import Each, Length, Range, checked
from subfleet.protocol.limits import PositiveAmount, PositiveFraction


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class NormLayer:
    """A norm with running statistics.

    Attributes:
        name: of the layer in the submodel.
        positions: number of values in each channel of one sample: 1, or height times width.
        momentum: weight of a batch in the running statistics, above 0 and at most 1.
        scale: factor by which inputs are smaller in training than in use, above 0: the rate of HeteroFL's scaler.
    """

    name: str
    positions: Annotated[int, Range(least=1, most=2**31)]
    momentum: PositiveFraction
    scale: PositiveAmount = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Calibration:
    """The norms to calibrate, one or more."""

    norms: Annotated[tuple[NormLayer, ...], Length(least=1), Each(key=attrgetter("name"))]


def name_sums(norm: str) -> tuple[str, str, str]:
    """Name a norm's tensors in the answer: count (int64, scalar), sum and sum of squares (float64, one per channel)."""
    return f"{norm}.count", f"{norm}.sum", f"{norm}.square_sum"
