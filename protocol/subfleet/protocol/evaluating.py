"""Settings and results of an evaluation on a device's held-out data."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from subfleet.protocol.bounds import Range, Rules, checked
from subfleet.protocol.limits import ClassCounts, Count, Fraction, Loss, Positive, Samples
from subfleet.protocol.metric_sums import MetricSums, Totals, check_sums
from subfleet.protocol.paths import PathScore
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import Objective

NO_HELD_OUT = "this device has no held-out data to evaluate on; name some with --held-out when it joins"
"""Why a device evaluates nothing."""
MAX_LABELS = 2**50
"""Of one client: a label for each token of its samples."""
LabelCount = Annotated[int, Range(least=1, most=MAX_LABELS)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class EvaluationSettings:
    """Settings of an evaluation: samples are taken in order, without augmentation.

    Attributes:
        batch_size: samples that the program takes at once, 1 or more.
        per_class: also count the labels of each class, those that were predicted rightly or as it, and what follows
            from scores.
        population: paths of the task's subspace, each as the operators of its choices in order, that are evaluated one
            after another, with a chain as the program; empty where the architecture is a network by itself.
        objective: of the training, which says what labels are.
    """

    batch_size: Positive
    per_class: bool = False
    population: tuple[tuple[str, ...], ...] = field(default=(), metadata=ADDED_LATER)
    objective: Objective = field(default="cross_entropy", metadata=ADDED_LATER)


class Claims(Protocol):
    """The claimed result of an evaluation, by a trainer or a device."""

    @property
    def loss(self) -> float:
        """Mean over the labels that counted, 0 or more."""
        ...

    @property
    def accuracy(self) -> float:
        """Fraction of them that was predicted correctly, 0 to 1."""
        ...

    @property
    def sample_count(self) -> int:
        """Of the data."""
        ...

    @property
    def label_count(self) -> int:
        """Labels that counted."""
        ...

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Labels of each class; empty if they were not counted."""
        ...

    @property
    def class_correct(self) -> tuple[int, ...]:
        """Labels of each class that were predicted correctly."""
        ...

    @property
    def sums(self) -> MetricSums:
        """Sums for further metrics."""
        ...

    @property
    def measured_peak_bytes(self) -> int:
        """Growth of the process."""
        ...


def _check_classes(class_counts: tuple[int, ...], class_correct: tuple[int, ...], label_count: int) -> Iterator[str]:
    if len(class_counts) != len(class_correct):
        yield f"there are {len(class_counts)} class_counts and {len(class_correct)} class_correct, but must be as many"
    elif any(not 0 <= right <= count for count, right in zip(class_counts, class_correct, strict=True)):
        yield "each of class_correct must be 0 up to that of class_counts, but one is not"
    if sum(class_counts) > label_count:
        yield f"class_counts add up to {sum(class_counts)}, but label_count is {label_count}"


CLAIM_RULES: Rules = (_check_classes, check_sums)
"""By which the numbers of `Claims` do not contradict each other."""


def sum_totals(claims: Claims) -> Totals:
    """Convert a claim to sums over the labels."""
    return Totals(
        label_count=claims.label_count,
        loss=claims.loss * claims.label_count,
        correct=round(claims.accuracy * claims.label_count),
        class_counts=claims.class_counts,
        class_correct=claims.class_correct,
        sums=claims.sums,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*CLAIM_RULES)
class EvaluationResult:
    """The result of an evaluation in a trainer; see `subfleet.protocol.answers.Evaluated` for the numbers.

    Attributes:
        scores: of each path of a population, in its order; loss and accuracy are then their means.
    """

    loss: Loss
    accuracy: Fraction
    sample_count: Samples
    label_count: LabelCount
    measured_peak_bytes: Count
    class_counts: ClassCounts = ()
    class_correct: ClassCounts = ()
    scores: tuple[PathScore, ...] = ()
    sums: MetricSums = field(default_factory=MetricSums)
