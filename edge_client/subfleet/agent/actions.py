"""The actions that the agent asks for, as plain, frozen data."""

from dataclasses import dataclass

from subfleet.agent.states import Saved
from subfleet.protocol.answers import Answer
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Message, RoundInfo, Telemetry
from subfleet.protocol.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send a message once."""

    message: Message
    retain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send a message again and again until it is settled."""

    message: Telemetry | Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Stop sending a kept message."""

    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Fetch a blob from the server; `BlobArrived` or `BlobFailed` answers."""

    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelFetch:
    """A blob is not needed any more."""

    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Weigh:
    """Find out how much disk space a task would take; `Weighed` answers.

    Attributes:
        pinned: digests of the blobs that are never removed: the task's, and updates without an ack.
    """

    task: Task
    pinned: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureForRound:
    """Read the device's resources for an announcement; `Measured` answers.

    Attributes:
        info: the announcement, with the time at which a replayed log is read.
        pinned: digests of the blobs that are never removed.
    """

    info: RoundInfo
    pinned: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureForTask:
    """Read the device's resources before work on a task begins; `Measured` answers.

    Attributes:
        log_time_s: at which a replayed log is read; None means the time of the last reading.
    """

    task_id: str
    log_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRegularly:
    """Read the device's resources, every few seconds; `Measured` answers."""


Measure = MeasureForRound | MeasureForTask | MeasureRegularly


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWork:
    """Start a task on the worker; `Trained`, `Scored`, `EvaluationEnded` or `WorkFailed` answers."""

    task: Task
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWork:
    """Tell the worker to stop; it still answers."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceModels:
    """Copy the fetched models to their folder; `Placed` or `WorkFailed` answers."""

    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the state to disk before any later action."""

    saved: Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Remove every blob that is not in `keep`, digests."""

    keep: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Leave: the run is finished, and nothing is left to do."""


_OnDisk = Weigh | PlaceModels | Save | Prune
Action = Publish | Keep | Settle | Fetch | CancelFetch | Measure | StartWork | StopWork | _OnDisk | Leave
