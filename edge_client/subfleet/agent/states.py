"""What the agent knows, what can happen to it, and what it can ask for: plain, frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from subfleet.agent.saved import Saved
from subfleet.agent.weighing import Weigh, Weighed
from subfleet.protocol.answers import Answer
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import (
    Deployed,
    Evaluated,
    Message,
    Profile,
    Refusal,
    RefusalReason,
    RoundInfo,
    Scores,
    Telemetry,
    Update,
)
from subfleet.protocol.programs import EvaluationResult, TrainResult
from subfleet.protocol.readings import LogLow, Reading
from subfleet.protocol.task import Task

__all__ = [
    "Action",
    "AgentSettings",
    "AgentState",
    "Answer",
    "BlobArrived",
    "BlobFailed",
    "CancelFetch",
    "EvaluationEnded",
    "Event",
    "Fetch",
    "Job",
    "Keep",
    "Leave",
    "LinkDown",
    "LinkUp",
    "Measure",
    "Measured",
    "Pending",
    "Place",
    "Placed",
    "Prune",
    "Publish",
    "Received",
    "Save",
    "Saved",
    "Scored",
    "Settle",
    "StopTraining",
    "Tick",
    "Train",
    "Trained",
    "WorkFailed",
]

_LABEL_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What does not change while an agent runs.

    Attributes:
        profile: what the device is; its client and session id are the agent's.
        data_bytes: what the samples take while the device trains or evaluates, of the larger data: one of them is in
            memory at a time, and none is when the budget is measured. As they were read, without a transform.
        streams: as in `DataSummary`.
        heartbeat_s: seconds between two presences, as is telemetry_s between two telemetries outside rounds.
        leave_when_finished: leave when the run that the device took part in is over.
        linger_s: how long nothing may have happened after the end of the run before the agent leaves.
        leave_limit_s: seconds after the end of the run after which it leaves although a receipt is missing.
        keep_s: how long an answer is sent again without a receipt.
    """

    profile: Profile
    data_bytes: int = 0
    streams: bool = False
    heartbeat_s: float = 5.0
    telemetry_s: float = 5.0
    leave_when_finished: bool = False
    linger_s: float = 2.0
    leave_limit_s: float = 60.0
    keep_s: float = 24 * 3600.0

    def data_bytes_in(self, info: RoundInfo | None) -> int:
        """What the samples take in the run of an announcement, whose transform may bring them to another size."""
        if info is None or not info.sample_bytes:
            return self.data_bytes
        most = max(self.profile.sample_count, self.profile.held_out_count)
        return most * (info.sample_bytes + _LABEL_BYTES) + (0 if self.streams else self.data_bytes)

    @property
    def client_id(self) -> str:
        """The device's id."""
        return self.profile.client_id

    @property
    def session_id(self) -> str:
        """The id of this start of the agent."""
        return self.profile.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The task that the device works on.

    Attributes:
        stage: "waiting" for its round's announcement; "weighing" whether disk and link can bear it; "fetching" what is
            lacking; "measuring" whether it still fits; "working" (training, scoring, evaluating, or placing models).
        lacking: digests of the blobs that have not come yet.
        arrived_at_s: when it came.
    """

    task: Task
    stage: Literal["waiting", "weighing", "fetching", "measuring", "working"]
    lacking: frozenset[str]
    arrived_at_s: float

    @property
    def deadline_at_s(self) -> float:
        """When an answer is worth nothing any more."""
        return self.arrived_at_s + self.task.deadline_s

    @property
    def exhausted(self) -> RefusalReason:
        """What there was too little of where the deadline comes now."""
        reasons: Mapping[str, RefusalReason] = {"fetching": "link", "working": "compute"}
        return reasons.get(self.stage, "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message without a receipt; given up at `until_s`."""

    message: Telemetry | Answer
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """Everything that the agent knows.

    Attributes:
        connected: whether the link is up.
        round: the newest announcement, at first the one that an earlier process knew.
        round_at_s: when it came; None after a connect, until the server has said what is current.
        job: the task in hand.
        running: id of the task that the worker still runs, also after it was told to stop; one at a time.
        pending: messages without a receipt.
        done: ids of the last tasks that were answered or replaced.
        programs: digests of the last programs that trained or evaluated.
        reading: the last one.
        heartbeat_due_s: when the next presence is due, as is telemetry_due_s.
        finished_at_s: when the run was over; busy_at_s when there was last something to do.
    """

    connected: bool = False
    round: RoundInfo | None = None
    round_at_s: float | None = None
    job: Job | None = None
    running: str | None = None
    pending: tuple[Pending, ...] = ()
    done: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    reading: Reading | None = None
    heartbeat_due_s: float = 0.0
    telemetry_due_s: float = 0.0
    finished_at_s: float | None = None
    busy_at_s: float = 0.0

    def saved(self) -> Saved:
        """The part that outlives the process."""
        messages = [entry.message for entry in self.pending]
        return Saved(
            round=self.round,
            task=None if self.job is None else self.job.task,
            updates=tuple(message for message in messages if isinstance(message, Update)),
            refusals=tuple(message for message in messages if isinstance(message, Refusal)),
            deployed=tuple(message for message in messages if isinstance(message, Deployed)),
            scores=tuple(message for message in messages if isinstance(message, Scores)),
            evaluated=tuple(message for message in messages if isinstance(message, Evaluated)),
            done=self.done,
            programs=self.programs,
        )


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
    """What a `Measure` found.

    Attributes:
        measure: what was asked.
        log_time_s: the time in the replayed log that was read; None for a live reading.
        memory_budget_bytes: the share of free memory that training may take.
        log_low: what the log has but for the share of time that was named; None where none was, or there is no log.
        disk_budget_bytes: what a task may take of the disk, beside what was to stay; None is unknown.
    """

    measure: "Measure"
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
    """The worker ended without a result."""

    task_id: str
    reason: RefusalReason
    detail: str
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


_Ended = Trained | Scored | EvaluationEnded | Placed | WorkFailed
Event = LinkUp | LinkDown | Received | Weighed | BlobArrived | BlobFailed | Measured | _Ended | Tick


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
