"""Statistics of a data set's inputs, and a test whether two data sets have the same scale.

Nobody sees a device's samples, and a single device that feeds 0 to 255 where all others feed 0 to 1 ruins the model.
Four numbers detect that. Honest data may differ too (only one class, only dark pictures, few samples), but then the
numbers differ by a small factor; another scale differs by hundreds, or has values that pictures never have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked

MAX_VALUE = 2.0**128
"""Inputs are single precision or indices, which are all smaller."""
Value = Annotated[float, Range(least=-MAX_VALUE, most=MAX_VALUE)]
_ROUNDING = 1e-3
"""Relative error of rounding, by which a mean may exceed the maximum."""

LARGEST_RATIO = 64.0
"""Largest ratio of deviations, and of largest values, on one scale; bytes and fractions differ by 255. For devices with
one class, with Dirichlet 0.05, with few samples and with only dark or bright pictures (digits, Fashion-MNIST, CIFAR-10,
Speech Commands) deviations differed by at most 8.1 and largest values by at most 5.6."""
_UNIT_EDGE = 0.05
"""Values that span the unit interval reach at least this close to 0 and 1."""
_BELOW_UNIT = -0.25
_ABOVE_UNIT = 2.0
"""Values beyond these are not on the scale of 0 to 1: standardised pictures start at -0.4 or below."""


def _check_statistics(record: "InputStatistics") -> Iterator[str]:
    minimum, maximum = record.minimum, record.maximum
    if minimum > maximum:
        yield f"minimum is {minimum:g}, but must be at most maximum {maximum:g}"
        return
    slack = _ROUNDING * max(abs(minimum), abs(maximum))
    if not minimum - slack <= record.mean <= maximum + slack:
        yield f"mean is {record.mean:g}, but must be from {minimum:g} to {maximum:g}"
    # Popoviciu's inequality: the deviation is largest if half of the values are at each end.
    if not 0 <= record.deviation <= (maximum - minimum) / 2 + slack:
        yield f"deviation is {record.deviation:g}, but values from {minimum:g} to {maximum:g} cannot have it"
    if record.kind == "indices" and minimum < 0:
        yield f"minimum is {minimum:g}, but must be 0 or more for indices"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_statistics)
class InputStatistics:
    """Statistics of all values of all inputs, as they were read and scaled, before a run's transform.

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
        """Magnitude of the value that is farthest from 0."""
        return max(abs(self.minimum), abs(self.maximum))


def find_scale_problem(first: InputStatistics, second: InputStatistics) -> str:
    """Explain why two data sets have different scales; empty if nothing suggests it. The order does not matter.

    Nothing can be said if all values of a data set are equal, as in black pictures.
    """
    if first.kind != second.kind:
        return f"{first.kind} beside {second.kind}"
    if first.kind == "indices" or not (first.deviation and second.deviation):
        return ""
    ratio = _compute_ratio(first.deviation, second.deviation)
    # Both are required: a few outliers change only the largest value, and honest noise only the deviation.
    if ratio > LARGEST_RATIO and _compute_ratio(first.size, second.size) > LARGEST_RATIO:
        return f"a deviation {ratio:.0f} times as large"
    for unit, wide in ((first, second), (second, first)):
        if _spans_unit(unit) and (wide.minimum < _BELOW_UNIT or wide.maximum > _ABOVE_UNIT):
            return f"values from 0 to 1 beside {wide.minimum:.3g} to {wide.maximum:.3g}"
    return ""


def _compute_ratio(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


def _spans_unit(statistics: InputStatistics) -> bool:
    return 0 <= statistics.minimum <= _UNIT_EDGE and 1 - _UNIT_EDGE <= statistics.maximum <= 1
