"""The state of the agent, as plain, frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from subfleet.agent.survival import Survival
from subfleet.protocol.answers import Answer
from subfleet.protocol.messages import (
    Deployed,
    Evaluated,
    Profile,
    Refusal,
    RefusalReason,
    RoundInfo,
    Scores,
    Telemetry,
    Update,
)
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task import Task

_LABEL_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings that do not change while an agent runs.

    Attributes:
        profile: what the device is; its client and session id are the agent's.
        data_bytes: memory of the samples of the larger data set, before any transform. One data set is in memory
            during a task, and none when the budget is measured.
        streams: as in `DataSummary`.
        heartbeat_s: seconds between two presences, as is telemetry_s between two telemetries outside rounds.
        leave_when_finished: leave when the run that the device took part in is finished.
        linger_s: how long the agent waits after the last activity of a finished run before it leaves.
        leave_limit_s: seconds after the end of the run at which it leaves even if an ack is missing.
        keep_s: how long an answer without an ack is sent again.
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
        """Compute the memory of the samples in the announced run; its transform may change their size."""
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
class Saved:
    """The part of the state that outlives the process.

    Attributes:
        round: the last announcement of the run that the device takes part in.
        task: the task without an answer.
        updates: answers without an ack, as are refusals, deployed, scores and evaluated.
        done: ids of the last tasks that were answered or replaced.
        programs: digests of the last programs that trained or evaluated, the newest last.
        frozen: digests of the last frozen weights, the newest last.
        survival: the deaths of this device's processes during work, and their consequence.
    """

    round: RoundInfo | None = None
    task: Task | None = None
    updates: tuple[Update, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    deployed: tuple[Deployed, ...] = ()
    scores: tuple[Scores, ...] = ()
    done: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    evaluated: tuple[Evaluated, ...] = field(default=(), metadata=ADDED_LATER)
    survival: Survival = field(default=Survival(), metadata=ADDED_LATER)
    frozen: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Every answer without an ack."""
        return (*self.updates, *self.refusals, *self.deployed, *self.scores, *self.evaluated)

    @property
    def blobs(self) -> frozenset[str]:
        """Digests of the blobs to keep: programs and frozen weights for later tasks, and pinned blobs."""
        return frozenset((*self.programs, *self.frozen)) | self.pinned

    @property
    def pinned(self) -> frozenset[str]:
        """Digests of the blobs that are never removed: those of the task, and updates without an ack."""
        of_task = () if self.task is None else self.task.blobs
        return frozenset(blob.sha256 for blob in (*of_task, *(update.blob for update in self.updates)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentTask:
    """The task that the device works on.

    Attributes:
        stage: "waiting" for its round's announcement; "weighing" it against disk and link; "fetching" missing blobs;
            "measuring" whether it still fits; "working" (training, scoring, evaluating, or placing models).
        lacking: digests of the missing blobs.
        arrived_at_s: monotonic time of its arrival.
    """

    task: Task
    stage: Literal["waiting", "weighing", "fetching", "measuring", "working"]
    lacking: frozenset[str]
    arrived_at_s: float

    @property
    def deadline_at_s(self) -> float:
        """The time after which an answer is of no use."""
        return self.arrived_at_s + self.task.deadline_s

    @property
    def timeout_reason(self) -> RefusalReason:
        """The reason to refuse the task if its deadline passes in this stage."""
        reasons: Mapping[str, RefusalReason] = {"fetching": "link", "working": "compute"}
        return reasons.get(self.stage, "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message without an ack; given up at `until_s`."""

    message: Telemetry | Answer
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """The whole state of the agent.

    Attributes:
        connected: whether the link is up.
        round: the newest announcement; at the start, the last one of the previous process.
        round_at_s: time of its arrival; None after a connect, until the server announces the current round.
        current: the task that the device works on.
        running: id of the task that the worker runs, even after a request to stop; one at a time.
        pending: messages without an ack.
        done: ids of the last tasks that were answered or replaced.
        programs: digests of the last programs that trained or evaluated.
        frozen: digests of the last frozen weights.
        survival: the deaths of this device's processes during work, and their consequence.
        reading: the last one.
        heartbeat_due_s: when the next presence is due, as is telemetry_due_s.
        finished_at_s: time of the end of the run.
        busy_at_s: time of the last activity.
    """

    connected: bool = False
    round: RoundInfo | None = None
    round_at_s: float | None = None
    current: CurrentTask | None = None
    running: str | None = None
    pending: tuple[Pending, ...] = ()
    done: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    survival: Survival = field(default=Survival())
    reading: Reading | None = None
    heartbeat_due_s: float = 0.0
    telemetry_due_s: float = 0.0
    finished_at_s: float | None = None
    busy_at_s: float = 0.0

    @property
    def durable(self) -> tuple[object, ...]:
        """Everything that `saved` follows from; compared sooner than it is made."""
        task = None if self.current is None else self.current.task
        return (self.round, task, self.pending, self.done, self.programs, self.frozen, self.survival)

    @property
    def saved(self) -> Saved:
        """The part that outlives the process."""
        messages = [entry.message for entry in self.pending]
        return Saved(
            round=self.round,
            task=None if self.current is None else self.current.task,
            updates=tuple(message for message in messages if isinstance(message, Update)),
            refusals=tuple(message for message in messages if isinstance(message, Refusal)),
            deployed=tuple(message for message in messages if isinstance(message, Deployed)),
            scores=tuple(message for message in messages if isinstance(message, Scores)),
            evaluated=tuple(message for message in messages if isinstance(message, Evaluated)),
            done=self.done,
            programs=self.programs,
            frozen=self.frozen,
            survival=self.survival,
        )
