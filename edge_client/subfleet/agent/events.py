"""The events that the agent handles, as plain, frozen data."""

from dataclasses import dataclass

from subfleet.agent.actions import Measure
from subfleet.agent.outcomes import Ended
from subfleet.protocol.messages import Message
from subfleet.protocol.readings import LogLow, Reading
from subfleet.protocol.reasons import RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """The link to the broker is up, for the first time or again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link to the broker is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message from the server."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The answer to `Weigh`.

    Attributes:
        lacking: digests of the task's blobs that are missing or incomplete.
        room_bytes: what may be written after everything that is not pinned was removed.
    """

    task_id: str
    lacking: frozenset[str]
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobArrived:
    """A blob was fetched and checked."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFailed:
    """A blob cannot be fetched; `detail` is one sentence."""

    sha256: str
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The answer to a `Measure`.

    Attributes:
        measure: the action.
        log_time_s: the time in the replayed log that was read; None for a live reading.
        memory_budget_bytes: the fraction of free memory that training may take.
        log_low: a low quantile of the log; None if none was requested, or nothing is replayed.
        disk_budget_bytes: disk space for a task, next to pinned blobs; None is unknown.
    """

    measure: Measure
    log_time_s: float | None
    reading: Reading
    memory_budget_bytes: int
    log_low: LogLow | None = None
    disk_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The process is about to stop on purpose, and stops its work."""


Event = LinkUp | LinkDown | Received | Weighed | BlobArrived | BlobFailed | Measured | Ended | TimePassed | Stopping
