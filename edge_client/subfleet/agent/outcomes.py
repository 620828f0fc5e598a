"""How work on a task can end, as plain, frozen data; the worker process loads no other part of the agent."""

from dataclasses import dataclass

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.reasons import RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """The worker finished a training or calibration; its output is stored as a blob."""

    task_id: str
    result: TrainResult
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringEnded:
    """The worker tried every candidate of a score task."""

    task_id: str
    scores: tuple[CandidateScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """The worker evaluated a model."""

    task_id: str
    result: EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPlaced:
    """The models of a deploy task are in their folder."""

    task_id: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """The worker ended without a result.

    Attributes:
        available_bytes: for "memory", "disk" and "link", what is available; None is unknown.
        killed: whether the system killed the worker process.
    """

    task_id: str
    reason: RefusalReason
    detail: str
    available_bytes: int | None = None
    killed: bool = False


Ended = TrainingEnded | ScoringEnded | EvaluationEnded | ModelsPlaced | WorkFailed
"""How work on a task can end."""
