"""What the agent can ask for: plain, frozen data."""

from dataclasses import dataclass

from subfleet.agent.states import Saved
from subfleet.protocol.answers import Answer
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Message, RoundInfo, Telemetry
from subfleet.protocol.task import Task

__all__ = [
    "Action",
    "CancelFetch",
    "Fetch",
    "Keep",
    "Leave",
    "Measure",
    "MeasureForRound",
    "MeasureForTask",
    "MeasureRegularly",
    "PlaceModels",
    "Prune",
    "Publish",
    "Save",
    "Settle",
    "StartWork",
    "StopWork",
    "Weigh",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send once."""

    message: Message
    retain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send until it is settled."""

    message: Telemetry | Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Stop sending a kept message."""

    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Get a blob from the server; `BlobArrived` or `BlobFailed` answers."""

    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelFetch:
    """A blob is not needed any more."""

    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Weigh:
    """Find out how much of the disk a task would take; `Weighed` answers.

    Attributes:
        pinned: digests of the blobs that stay whatever needs room: those of the task, and updates without an ack.
    """

    task: Task
    pinned: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureForRound:
    """Read the device's resources for an announcement; `Measured` answers.

    Attributes:
        info: the announcement, which says where a replayed log is to be read.
        pinned: digests of the blobs that stay whatever needs room.
    """

    info: RoundInfo
    pinned: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureForTask:
    """Read the device's resources before work on a task begins; `Measured` answers.

    Attributes:
        log_time_s: where a replayed log is to be read; None: where it was read last.
    """

    task_id: str
    log_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRegularly:
    """Read the device's resources, as is done every few seconds; `Measured` answers."""


Measure = MeasureForRound | MeasureForTask | MeasureRegularly


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWork:
    """Have the worker do a task; `Trained`, `Scored`, `EvaluationEnded` or `WorkFailed` answers."""

    task: Task
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWork:
    """Tell the worker to stop; it still answers."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceModels:
    """Put the fetched models into their folder; `Placed` or `WorkFailed` answers."""

    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write this to disk before any later action."""

    saved: Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Remove every blob whose digest is not named."""

    keep: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The run is over and nothing is left to do."""


_OnDisk = Weigh | PlaceModels | Save | Prune
Action = Publish | Keep | Settle | Fetch | CancelFetch | Measure | StartWork | StopWork | _OnDisk | Leave
