"""What the agent can ask for: plain, frozen data."""

from dataclasses import dataclass
from typing import Literal

from subfleet.agent.saved import Saved
from subfleet.agent.weighing import Weigh
from subfleet.protocol.answers import Answer
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Message, Telemetry
from subfleet.protocol.task import Task

__all__ = [
    "Action",
    "CancelFetch",
    "Fetch",
    "Keep",
    "Leave",
    "Measure",
    "Place",
    "Prune",
    "Publish",
    "Save",
    "Settle",
    "StopTraining",
    "Train",
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
class Measure:
    """Read the device's resources; `Measured` answers.

    Attributes:
        purpose: "round" answers an announcement, "task" is the check before training, "live" is the regular one.
        log_time_s: where a replayed log is to be read; None: where it was read last.
        run_id: for "round", of the announcement, as are round, retry and log_quantile.
        task_id: for "task", whose check it is.
        pinned: for "round", digests of the blobs that stay whatever needs room.
    """

    purpose: Literal["round", "task", "live"]
    log_time_s: float | None = None
    run_id: str | None = None
    round: int | None = None
    retry: int = 0
    task_id: str = ""
    log_quantile: float | None = None
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Do a task in the worker; `Trained`, `Scored`, `EvaluationEnded` or `WorkFailed` answers."""

    task: Task
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTraining:
    """Tell the worker to stop; it still answers."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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


_Send = Publish | Keep | Settle
Action = _Send | Weigh | Fetch | CancelFetch | Measure | Train | StopTraining | Place | Save | Prune | Leave
