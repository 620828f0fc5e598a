"""What is asked of a device that evaluates a model on its held-out data, and what it found, as plain data."""

from dataclasses import dataclass, field
from typing import Protocol

from subfleet.protocol.limits import EVALUATION_LIMITS, MAX_COUNTED_CLASSES, MAX_LOSS, MAX_SAMPLES, check_lengths
from subfleet.protocol.metric_sums import MetricSums, Totals, check_sums
from subfleet.protocol.paths import PathScore
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import Objective

__all__ = [
    "MAX_COUNTED_CLASSES",
    "NO_HELD_OUT",
    "Claims",
    "EvaluationResult",
    "EvaluationSettings",
    "check_claims",
    "totals_of",
]

NO_HELD_OUT = "this device has no held-out data to evaluate on; name some with --held-out when it joins"
"""Why a device evaluates nothing."""
MAX_LABELS = 2**50
"""Of one client: a label for each token of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How a device evaluates: nothing is trained, and samples are taken in their order, as they are.

    Attributes:
        batch_size: samples that the program takes at once, 1 or more.
        per_class: also count the labels of each class, those that were predicted rightly or as it, and what follows
            from scores.
        population: paths of the task's subspace, each as the operators of its choices in order, that are evaluated one
            after another, with a chain as the program; empty where the spec is a network by itself.
        objective: of the training, which says what labels are.
    """

    batch_size: int
    per_class: bool = False
    population: tuple[tuple[str, ...], ...] = field(default=(), metadata=ADDED_LATER)
    objective: Objective = field(default="cross_entropy", metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be 1 or more")


class Claims(Protocol):
    """What is claimed of an evaluation, by a trainer or by a device."""

    @property
    def loss(self) -> float:
        """Mean over the labels that counted, 0 or more."""
        ...

    @property
    def accuracy(self) -> float:
        """Share of them that were predicted rightly, 0 to 1."""
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
        """Labels of each class; empty where they were not counted."""
        ...

    @property
    def class_correct(self) -> tuple[int, ...]:
        """Of these, those that were predicted rightly."""
        ...

    @property
    def sums(self) -> MetricSums:
        """What further metrics follow from."""
        ...

    @property
    def measured_peak_bytes(self) -> int:
        """Growth of the process."""
        ...


def check_claims(claims: Claims) -> None:
    """Refuse what no evaluation can have found.

    Raises:
        ValueError: a number is out of its range, or numbers contradict each other; the text says which.
    """
    if not 0 <= claims.loss < MAX_LOSS:
        raise ValueError(f"loss is {claims.loss}, but must be a number of single precision, 0 or more")
    if not 0 <= claims.accuracy <= 1:
        raise ValueError(f"accuracy is {claims.accuracy}, but must be from 0 to 1")
    if not 1 <= claims.sample_count <= MAX_SAMPLES:
        raise ValueError(f"sample_count is {claims.sample_count}, but must be 1 to {MAX_SAMPLES}")
    if not 1 <= claims.label_count <= MAX_LABELS:
        raise ValueError(f"label_count is {claims.label_count}, but must be 1 to {MAX_LABELS}")
    if claims.measured_peak_bytes < 0:
        raise ValueError(f"measured_peak_bytes is {claims.measured_peak_bytes}, but must be 0 or more")
    _check_classes(claims)
    check_sums(claims.sums)


def _check_classes(claims: Claims) -> None:
    check_lengths(claims, EVALUATION_LIMITS)
    counts, correct = claims.class_counts, claims.class_correct
    if len(counts) != len(correct):
        raise ValueError(f"there are {len(counts)} class_counts and {len(correct)} class_correct, but must be as many")
    if any(not 0 <= right <= count for count, right in zip(counts, correct, strict=True)):
        raise ValueError("each of class_correct must be 0 up to that of class_counts, but one is not")
    if sum(counts) > claims.label_count:
        raise ValueError(f"class_counts add up to {sum(counts)}, but label_count is {claims.label_count}")


def totals_of(claims: Claims) -> Totals:
    """What is claimed, as sums over the labels."""
    return Totals(
        label_count=claims.label_count,
        loss=claims.loss * claims.label_count,
        correct=round(claims.accuracy * claims.label_count),
        class_counts=claims.class_counts,
        class_correct=claims.class_correct,
        sums=claims.sums,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What came of an evaluation in a trainer; `subfleet.protocol.answers.Evaluated` says what the numbers are.

    Attributes:
        scores: of each path of a population, in its order; loss and accuracy are then their means.
    """

    loss: float
    accuracy: float
    sample_count: int
    label_count: int
    measured_peak_bytes: int
    class_counts: tuple[int, ...] = ()
    class_correct: tuple[int, ...] = ()
    scores: tuple[PathScore, ...] = ()
    sums: MetricSums = field(default_factory=MetricSums)

    def __post_init__(self) -> None:
        check_claims(self)
