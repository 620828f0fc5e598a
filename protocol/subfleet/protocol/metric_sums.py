"""The sums of an evaluation; those of several data sets add up."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TypeVar

from subfleet.protocol.limits import MAX_COUNTED_CLASSES, MAX_LOSS

SCORE_BINS = 128
"""Bins of an output's scores, an eighth of a unit of its logit each from -8 to 8, the ends open. Areas under curves
then follow from sums, and differ from those of the scores themselves by what falls into one bin."""
MAX_SCORED_OUTPUTS = 64
"""With more, scores are not told: their bins always fit a control message."""
MAX_MEASURED_OUTPUTS = 1024
"""Of regression: four numbers for each always fit a control message."""
_MOST_LABELS = 2**50

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums over labels for further metrics; empty if a task does not need them.

    Attributes:
        class_predicted: labels that were taken for each class; of several outputs those that each took for 1.
        positives: of each output the labels that are 1, or of that class, in each of `SCORE_BINS` bins of scores, one
            output after the other.
        negatives: the same of the other labels.
        absolute_errors: of each output.
        squared_errors: of each output.
        targets: of each output.
        squared_targets: of each output.
    """

    class_predicted: tuple[int, ...] = ()
    positives: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    absolute_errors: tuple[float, ...] = ()
    squared_errors: tuple[float, ...] = ()
    targets: tuple[float, ...] = ()
    squared_targets: tuple[float, ...] = ()

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Of both data sets together."""
        return MetricSums(**{one.name: _add(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All sums of an evaluation.

    Attributes:
        label_count: labels that counted.
        loss: the sum of theirs.
        correct: of them, those that were predicted rightly; 0 where that means nothing.
        class_counts: of them, those of each class, or of each output those that are 1; empty where that was not asked.
        class_correct: of these, those that were predicted rightly.
        sums: further ones.
    """

    label_count: int
    loss: float
    correct: int = 0
    class_counts: tuple[int, ...] = ()
    class_correct: tuple[int, ...] = ()
    sums: MetricSums = field(default_factory=MetricSums)

    def __add__(self, other: "Totals") -> "Totals":
        """Of both data sets together."""
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
        """Of one data set or more together.

        Raises:
            ValueError: there is none.
        """
        first, *others = parts
        for other in others:
            first += other
        return first

    @property
    def mean_loss(self) -> float:
        """Of a label."""
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
            yield f"{name} may have {most} numbers from 0 to 2^50, but has others or more"
    if len(sums.positives) != len(sums.negatives) or len(sums.positives) % SCORE_BINS:
        yield f"positives and negatives must have {SCORE_BINS} numbers for each output, both alike"
    errors = (sums.absolute_errors, sums.squared_errors, sums.targets, sums.squared_targets)
    if len({len(one) for one in errors}) > 1 or len(sums.targets) > MAX_MEASURED_OUTPUTS:
        yield f"errors and targets must be of as many outputs, {MAX_MEASURED_OUTPUTS} at most"
    most_sum = MAX_LOSS * _MOST_LABELS
    if not all(0 <= number < most_sum for one in (errors[0], errors[1], errors[3]) for number in one):
        yield "sums of errors and of squares must be numbers of 0 or more"
    if not all(abs(number) < most_sum for number in sums.targets):
        yield "sums of targets must be numbers"


def _add(one: tuple[_Number, ...], other: tuple[_Number, ...]) -> tuple[_Number, ...]:
    """Place by place; of what one of both does not tell, nothing is known of both together."""
    return tuple(map(sum, zip(one, other, strict=True))) if one and other else ()
