"""Settings and results of an evaluation on a device's held-out data."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from subfleet.protocol.bounds import Range, Rules, checked
from subfleet.protocol.limits import ClassCounts, Count, Fraction, Loss, Positive, Samples
from subfleet.protocol.metric_sums import MetricSums, check_sums
from subfleet.protocol.paths import PathScore
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import Objective

NO_HELD_OUT = "this device has no held-out data to evaluate on; name some with --held-out when it joins"
"""Why a device without held-out data refuses to evaluate."""
MAX_LABELS = 2**50
"""Labels of one client, which may have one for each token."""
LabelCount = Annotated[int, Range(least=1, most=MAX_LABELS)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class EvaluationSettings:
    """Settings of an evaluation: samples are taken in order, without augmentation.

    Attributes:
        batch_size: samples of one call, 1 or more.
        per_class: also count labels, predictions and correct predictions of each class, and sum scores.
        population: paths of the task's subspace to evaluate one after another with a chain program, each as the
            operators of its choices in order; empty if the architecture is a single network.
        objective: of the training; it determines what labels are.
    """

    batch_size: Positive
    per_class: bool = False
    population: tuple[tuple[str, ...], ...] = field(default=(), metadata=ADDED_LATER)
    objective: Objective = field(default="cross_entropy", metadata=ADDED_LATER)


def _check_classes(class_counts: tuple[int, ...], class_correct: tuple[int, ...], label_count: int) -> Iterator[str]:
    if len(class_counts) != len(class_correct):
        yield f"there are {len(class_counts)} class_counts, but {len(class_correct)} class_correct"
    elif any(not 0 <= right <= count for count, right in zip(class_counts, class_correct, strict=True)):
        yield "each class_correct must be from 0 to its class_counts, but one is not"
    if sum(class_counts) > label_count:
        yield f"class_counts add up to {sum(class_counts)}, but label_count is {label_count}"


CLAIM_RULES: Rules = (_check_classes, check_sums)
"""Rules for the numbers of an evaluation, which must not contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*CLAIM_RULES)
class EvaluationResult:
    """The result of an evaluation in a trainer; see `subfleet.protocol.answers.Evaluated` for the numbers.

    Attributes:
        scores: score of each path of a population, in its order; loss and accuracy are then their means.
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
