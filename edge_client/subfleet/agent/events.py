"""What can happen to the agent: plain, frozen data."""

from dataclasses import dataclass

from subfleet.agent.actions import Measure
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.messages import Message, RefusalReason
from subfleet.protocol.readings import LogLow, Reading

__all__ = [
    "BlobArrived",
    "BlobFailed",
    "Ended",
    "EvaluationEnded",
    "Event",
    "LinkDown",
    "LinkUp",
    "Measured",
    "Placed",
    "Received",
    "Scored",
    "Stopping",
    "Tick",
    "Trained",
    "Weighed",
    "WorkFailed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """The link to the broker is up, for the first time or again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link to the broker is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message came."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The answer to `Weigh`.

    Attributes:
        lacking: digests of the task's blobs that are not here as a whole.
        room_bytes: what may be written, once all that is not pinned has gone.
    """

    task_id: str
    lacking: frozenset[str]
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobArrived:
    """A blob is here, whole and checked."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFailed:
    """A blob cannot be had; `detail` says why in one sentence."""

    sha256: str
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The answer to a `Measure`.

    Attributes:
        measure: what was asked.
        log_time_s: the time in the replayed log that was read; None for a live reading.
        memory_budget_bytes: the fraction of free memory that training may take.
        log_low: what the log has but for the fraction of time that was named; None where none was, or there is no log.
        disk_budget_bytes: what a task may take of the disk, beside what was to stay; None is unknown.
    """

    measure: Measure
    log_time_s: float | None
    reading: Reading
    memory_budget_bytes: int
    log_low: LogLow | None = None
    disk_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The worker ended with a result, which is stored as a blob."""

    task_id: str
    result: TrainResult
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The worker has tried every candidate of a score task."""

    task_id: str
    scores: tuple[CandidateScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """The worker has evaluated a model."""

    task_id: str
    result: EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The models of a deploy task stand in their folder."""

    task_id: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """The worker ended without a result.

    Attributes:
        available_bytes: for "memory", "disk" and "link", what there is; None is unknown.
        killed: whether the system killed the process that did the work.
    """

    task_id: str
    reason: RefusalReason
    detail: str
    available_bytes: int | None = None
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The process is about to end on purpose; it stops the work that is under way."""


Ended = Trained | Scored | EvaluationEnded | Placed | WorkFailed
"""How work on a task can end."""

Event = LinkUp | LinkDown | Received | Weighed | BlobArrived | BlobFailed | Measured | Ended | Tick | Stopping
