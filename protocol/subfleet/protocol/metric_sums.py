"""Sums over the labels of an evaluation. The sums of several data sets add up to those of all of them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TypeVar

from subfleet.protocol.limits import MAX_COUNTED_CLASSES, MAX_LOSS

SCORE_BINS = 128
"""Bins of an output's scores: each is an eighth of a logit wide, from -8 to 8 with open ends. Areas under curves are
computed from these sums; they are exact up to the order of scores within a bin."""
MAX_SCORED_OUTPUTS = 64
"""With more outputs scores are not reported, so that the bins always fit a control message."""
MAX_MEASURED_OUTPUTS = 1024
"""Outputs of a regression: four numbers for each always fit a control message."""
_MOST_LABELS = 2**50

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums over labels for further metrics; empty if a task does not need them.

    Attributes:
        class_predicted: predictions of each class; of several outputs, how often each one predicted 1.
        positives: histogram with `SCORE_BINS` bins of the scores of labels that are 1, or of the output's class; one
            histogram for each output, one after the other.
        negatives: histograms of the scores of the other labels.
        absolute_errors: sum for each output.
        squared_errors: sum for each output.
        targets: sum for each output.
        squared_targets: sum for each output.
    """

    class_predicted: tuple[int, ...] = ()
    positives: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    absolute_errors: tuple[float, ...] = ()
    squared_errors: tuple[float, ...] = ()
    targets: tuple[float, ...] = ()
    squared_targets: tuple[float, ...] = ()

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Add the sums of another data set."""
        names = [field.name for field in fields(self)]
        return MetricSums(**{name: _add(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All sums of an evaluation.

    Attributes:
        label_count: number of labels that count.
        loss: sum of their losses.
        correct: number of correct predictions; 0 if accuracy has no meaning.
        class_counts: labels of each class, or for several outputs the labels of each that are 1; empty if not counted.
        class_correct: correct predictions of each class.
        sums: sums for further metrics.
    """

    label_count: int
    loss: float
    correct: int = 0
    class_counts: tuple[int, ...] = ()
    class_correct: tuple[int, ...] = ()
    sums: MetricSums = field(default_factory=MetricSums)

    def __add__(self, other: "Totals") -> "Totals":
        """Add the totals of another data set."""
        return Totals(
            label_count=self.label_count + other.label_count,
            loss=self.loss + other.loss,
            correct=self.correct + other.correct,
            class_counts=_add(self.class_counts, other.class_counts),
            class_correct=_add(self.class_correct, other.class_correct),
            sums=self.sums + other.sums,
        )

    @classmethod
    def of_all(cls, parts: Iterable["Totals"]) -> "Totals":
        """Add the totals of one or more data sets.

        Raises:
            ValueError: there are none.
        """
        first, *others = parts
        for other in others:
            first += other
        return first

    @property
    def mean_loss(self) -> float:
        """Mean loss of a label; NaN without labels."""
        return self.loss / self.label_count if self.label_count else math.nan


def check_sums(sums: MetricSums) -> Iterator[str]:
    """Find the problems of sums in a message; a diverged model has no finite sums."""
    for name, most in (
        ("class_predicted", MAX_COUNTED_CLASSES),
        ("positives", MAX_SCORED_OUTPUTS * SCORE_BINS),
        ("negatives", MAX_SCORED_OUTPUTS * SCORE_BINS),
    ):
        counts = getattr(sums, name)
        if len(counts) > most or not all(0 <= count <= _MOST_LABELS for count in counts):
            yield f"{name} must have at most {most} numbers, each from 0 to 2^50"
    if len(sums.positives) != len(sums.negatives) or len(sums.positives) % SCORE_BINS:
        yield f"positives and negatives must both have {SCORE_BINS} numbers for each output"
    errors = (sums.absolute_errors, sums.squared_errors, sums.targets, sums.squared_targets)
    if len({len(series) for series in errors}) > 1 or len(sums.targets) > MAX_MEASURED_OUTPUTS:
        yield f"errors and targets must have the same number of outputs, at most {MAX_MEASURED_OUTPUTS}"
    most_sum = MAX_LOSS * _MOST_LABELS
    if not all(0 <= number < most_sum for series in (errors[0], errors[1], errors[3]) for number in series):
        yield "sums of errors and of squares must be finite and 0 or more"
    if not all(abs(number) < most_sum for number in sums.targets):
        yield "sums of targets must be finite"


def _add(first: tuple[_Number, ...], second: tuple[_Number, ...]) -> tuple[_Number, ...]:
    """Add element by element; the sum is unknown if either side is."""
    return tuple(map(sum, zip(first, second, strict=True))) if first and second else ()
