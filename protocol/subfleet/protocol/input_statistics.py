"""What the inputs of some data are like in four numbers, and whether two data sets are on one scale.

Nobody sees a device's samples, and one device that feeds 0 to 255 where all others feed 0 to 1 spoils the model of all.
Four numbers tell that apart from data that are honestly unlike: a device may have one class, dark pictures alone, or a
handful of samples, and its numbers differ by a factor of a few; another scale differs by one of hundreds, or reaches
where pictures do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked

MAX_VALUE = 2.0**128
"""Inputs are single precision, or indices: all are smaller."""
Value = Annotated[float, Range(least=-MAX_VALUE, most=MAX_VALUE)]
_ROUNDING = 1e-3
"""Statistics are sums of rounded numbers: a mean may lie beyond the maximum by a fraction of it."""

LARGEST_RATIO = 64.0
"""Of deviations and of the largest values: 255 stands between bytes and shares of one. Over devices of one class, at
Dirichlet 0.05, of a handful of samples and of dark or bright pictures alone (digits, Fashion-MNIST, CIFAR-10, Speech
Commands) deviations differed up to 8.1 times and largest values up to 5.6 times."""
_UNIT_EDGE = 0.05
"""How near values come to 0 and 1 where they span the unit interval."""
_BELOW_UNIT = -0.25
_ABOVE_UNIT = 2.0
"""What lies beyond these is not on the scale of 0 to 1: standardised pictures begin at -0.4 or below."""


def _check_statistics(record: "InputStatistics") -> Iterator[str]:
    minimum, maximum = record.minimum, record.maximum
    if minimum > maximum:
        yield f"minimum is {minimum:g}, but must be at most maximum {maximum:g}"
        return
    slack = _ROUNDING * max(abs(minimum), abs(maximum))
    if not minimum - slack <= record.mean <= maximum + slack:
        yield f"mean is {record.mean:g}, but must lie from {minimum:g} to {maximum:g}"
    # Half of them at either end deviate most (Popoviciu's inequality).
    if not 0 <= record.deviation <= (maximum - minimum) / 2 + slack:
        yield f"deviation is {record.deviation:g}, but cannot be that from {minimum:g} to {maximum:g}"
    if record.kind == "indices" and minimum < 0:
        yield f"minimum is {minimum:g}, but must be 0 or more for indices"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_statistics)
class InputStatistics:
    """Of all values of all inputs, as they were read and scaled, before a run's transform.

    Attributes:
        kind: "numbers", or "indices" such as tokens.
        minimum: the smallest value.
        maximum: the largest one.
        mean: of all values.
        deviation: standard deviation of all values, 0 or more.

    Raises:
        ValueError: no numbers could have these statistics.
    """

    kind: Literal["numbers", "indices"]
    minimum: Value
    maximum: Value
    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.minimum:.3g} to {self.maximum:.3g} with a deviation of {self.deviation:.3g}"

    @property
    def size(self) -> float:
        """Of the value that is farthest from 0."""
        return max(abs(self.minimum), abs(self.maximum))


def find_scale_problem(one: InputStatistics, other: InputStatistics) -> str:
    """Why two data sets are not on one scale; empty where nothing says so. It is the same either way round.

    Data that honestly differ are on one scale, whatever classes, brightness or number of samples they have. Where all
    values of one are equal, as in black pictures, nothing can be said.
    """
    if one.kind != other.kind:
        return f"{one.kind} beside {other.kind}"
    if one.kind == "indices" or not (one.deviation and other.deviation):
        return ""
    ratio = _is_larger(one.deviation, other.deviation)
    # Both: a few outliers move the largest value alone, and honest noise the deviation alone.
    if ratio > LARGEST_RATIO and _is_larger(one.size, other.size) > LARGEST_RATIO:
        return f"a deviation {ratio:.0f} times as large"
    for unit, wide in ((one, other), (other, one)):
        if _spans_unit(unit) and (wide.minimum < _BELOW_UNIT or wide.maximum > _ABOVE_UNIT):
            return f"values from 0 to 1 beside {wide.minimum:.3g} to {wide.maximum:.3g}"
    return ""


def _is_larger(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


def _spans_unit(found: InputStatistics) -> bool:
    return 0 <= found.minimum <= _UNIT_EDGE and 1 - _UNIT_EDGE <= found.maximum <= 1
