"""A device's answers to tasks. Each ends its task, and is kept until its ack."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.candidate_scores import MAX_CANDIDATES, CandidateScore
from subfleet.protocol.evaluating import CLAIM_RULES, EvaluationResult, LabelCount
from subfleet.protocol.identifiers import ClientId, make_message_id
from subfleet.protocol.limits import (
    MAX_LOSS,
    Amount,
    ClassCounts,
    Count,
    Fraction,
    Loss,
    MessageId,
    RunId,
    Samples,
    TaskId,
)
from subfleet.protocol.metric_sums import MetricSums, Totals
from subfleet.protocol.paths import PathScore, ReportedExamples
from subfleet.protocol.reasons import RefusalReason
from subfleet.protocol.schema import ADDED_LATER


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Refusal:
    """Refuses a task.

    Attributes:
        available_bytes: for "memory", the growth that is possible now; for "disk", what may be written.
    """

    KIND: ClassVar[str] = "refusal"
    task_id: TaskId
    run_id: RunId
    round: int
    client_id: ClientId
    reason: RefusalReason
    detail: str
    available_bytes: int | None = None
    message_id: MessageId = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Update:
    """A trained change of a submodel's weights; the server pulls its blob and answers with an ack.

    Attributes:
        blob: container of the change of every tensor of the submodel (new minus old), float32 or encoded by the task's
            codec. A calibrate task has a container of sums instead, see `subfleet.protocol.calibration.name_sums`.
        sample_count: number of training samples: the update's weight in the mean.
        measured_peak_bytes: growth of the process's high-water mark while it trained.
        train_seconds: wall time of the steps.
        seconds: wall time from the task's arrival to this message.
        square_loss: mean of the squares of the labels' losses, 0 or more; None unless the objective asks for it.
        operator_examples: if paths were drawn, the examples that went through each operator of the subspace.
    """

    KIND: ClassVar[str] = "update"
    task_id: TaskId
    run_id: RunId
    round: int
    client_id: ClientId
    blob: BlobRef
    sample_count: Samples
    step_count: int
    loss: Annotated[float, Range(above=-MAX_LOSS, below=MAX_LOSS, words="a number of single precision")]
    accuracy: float
    measured_peak_bytes: int
    train_seconds: float
    seconds: float
    message_id: MessageId = field(default_factory=make_message_id)
    square_loss: Loss | None = field(default=None, metadata=ADDED_LATER)
    operator_examples: ReportedExamples = field(default=(), metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Scores:
    """The scores of the candidates of a score task, in order.

    Attributes:
        scores: 1 to 16.
        seconds: wall time from the task's arrival to this message.
    """

    KIND: ClassVar[str] = "scores"
    task_id: TaskId
    run_id: RunId
    round: int
    client_id: ClientId
    scores: Annotated[tuple[CandidateScore, ...], Length(least=1, most=MAX_CANDIDATES)]
    seconds: float
    message_id: MessageId = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Deployed:
    """Reports that the inference models of a deploy task were fetched and their digests checked."""

    KIND: ClassVar[str] = "deployed"
    task_id: TaskId
    run_id: RunId
    client_id: ClientId
    files: tuple[str, ...]
    message_id: MessageId = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*CLAIM_RULES)
class Evaluated:
    """The result of evaluating a model on the device's held-out data.

    Attributes:
        loss: mean of the plain objective over the labels that count, 0 or more.
        accuracy: fraction of them that was predicted correctly, 0 to 1; 0 if accuracy has no meaning.
        sample_count: number of held-out samples.
        label_count: labels that count: one for each sample, for each token or pixel except padding, or for each output.
        class_counts: labels of each of the model's classes, or for several outputs the labels of each that are 1; empty
            if the task did not ask, if labels are numbers, or if there are too many classes for a message.
        class_correct: correct predictions of each class.
        measured_peak_bytes: growth of the process's high-water mark while it evaluated.
        seconds: wall time from the task's arrival to this message.
        scores: score of each path of the task's population, in its order; loss and accuracy are then their means.
        sums: sums for further metrics.
    """

    KIND: ClassVar[str] = "evaluated"
    task_id: TaskId
    run_id: RunId
    round: int
    client_id: ClientId
    loss: Loss
    accuracy: Fraction
    sample_count: Samples
    label_count: LabelCount
    measured_peak_bytes: Count
    seconds: Amount
    class_counts: ClassCounts = ()
    class_correct: ClassCounts = ()
    message_id: MessageId = field(default_factory=make_message_id)
    scores: tuple[PathScore, ...] = field(default=(), metadata=ADDED_LATER)
    sums: MetricSums = field(default=MetricSums(), metadata=ADDED_LATER)


def sum_totals(claims: Evaluated | EvaluationResult) -> Totals:
    """Convert the result of an evaluation to sums over its labels."""
    return Totals(
        label_count=claims.label_count,
        loss=claims.loss * claims.label_count,
        correct=round(claims.accuracy * claims.label_count),
        class_counts=claims.class_counts,
        class_correct=claims.class_correct,
        sums=claims.sums,
    )


Answer = Update | Refusal | Deployed | Scores | Evaluated
"""A message that ends a task."""
