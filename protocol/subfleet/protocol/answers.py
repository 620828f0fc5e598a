"""A device's answers to tasks, as messages: each ends its task, and is kept until its ack."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.candidate_scores import MAX_CANDIDATES, CandidateScore
from subfleet.protocol.evaluating import CLAIM_RULES, LabelCount
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
from subfleet.protocol.metric_sums import MetricSums
from subfleet.protocol.paths import PathScore, ReportedExamples
from subfleet.protocol.reasons import RefusalReason
from subfleet.protocol.schema import ADDED_LATER


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Refusal:
    """A device refuses a task, with the reason.

    Attributes:
        available_bytes: for "memory", the growth that it could bear now; for "disk", what may be written.
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
        blob: container of the change of every tensor of the submodel (new minus old), float32 or as the task's codec
            writes it; for a calibrate task of what `subfleet.protocol.calibration.name_sums` names.
        sample_count: samples that it was trained on: its weight in the mean.
        measured_peak_bytes: growth of the process's high-water mark while it trained.
        train_seconds: wall time of the steps.
        seconds: wall time from the task's arrival to this message.
        square_loss: mean of the squares of the labels' losses, where the task's objective asks for it; 0 or more.
        operator_examples: where the task has paths drawn, the examples that went through each operator of the subspace.
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
    """A device has fetched the inference models of a deploy task and checked their digests."""

    KIND: ClassVar[str] = "deployed"
    task_id: TaskId
    run_id: RunId
    client_id: ClientId
    files: tuple[str, ...]
    message_id: MessageId = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*CLAIM_RULES)
class Evaluated:
    """The result of evaluating a model, as it was sent, on the device's held-out data.

    Attributes:
        loss: mean of the plain objective over the labels that count, 0 or more.
        accuracy: share of them that were predicted rightly, 0 to 1; 0 where that means nothing.
        sample_count: of its held-out data.
        label_count: labels that counted: one of each sample, of each token or pixel that is no padding, or of each
            output.
        class_counts: of them, those of each class, one number for each of the model's classes, or of several outputs
            those of each that are 1; empty where the task did not ask, where labels are numbers, or where there are
            more classes than such a message may name.
        class_correct: of these, those that were predicted rightly.
        measured_peak_bytes: growth of the process's high-water mark while it evaluated.
        seconds: wall time from the task's arrival to this message.
        scores: of each path of the task's population, in its order; loss and accuracy are then their means.
        sums: what further metrics follow from.
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


Answer = Update | Refusal | Deployed | Scores | Evaluated
"""What ends a task."""
