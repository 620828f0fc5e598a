"""The agent of an emulated device: the decisions of a real one, performed in the server's process and in logical time.

Nothing is encoded, and blobs are read from the server's store, so that a client costs little more than its training.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from subfleet.agent.actions import (
    Action,
    CancelFetch,
    Fetch,
    Keep,
    Leave,
    MeasureForRound,
    MeasureForTask,
    MeasureRegularly,
    PlaceModels,
    Prune,
    Publish,
    Save,
    Settle,
    StartWork,
    StopWork,
    Weigh,
)
from subfleet.agent.composing import compose_telemetry
from subfleet.agent.events import BlobArrived, BlobFailed, Event, LinkUp, Received, TimePassed
from subfleet.agent.outcomes import ModelsPlaced, TrainingEnded, WorkFailed
from subfleet.agent.states import AgentSettings, AgentState
from subfleet.agent.stepping import step
from subfleet.device.meters import Meter
from subfleet.device.timing import Timing
from subfleet.edge_client.measuring import measure
from subfleet.edge_client.store import name_models
from subfleet.edge_client.task_work import Outcome, Store, store_output
from subfleet.emulation.batch.agenda import Agenda, LogicalClock
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.emulation.batch.resuming import AgentRecord
from subfleet.emulation.batch.work import ClientWork
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Message, RoundInfo
from subfleet.protocol.readings import Reading
from subfleet.protocol.task import Task


class Blobs(Store, Protocol):
    """What the server serves, and where outputs are stored; `BlobStore` is the real one."""

    def has(self, ref: BlobRef) -> bool:
        """Whether a blob can be fetched."""
        ...


@dataclass(eq=False, kw_only=True)
class EmulatedAgent:
    """An agent whose transfers and trainings take the time that its device would need.

    Attributes:
        settings: of the agent.
        work: does its tasks; their outcome is asked for at the moment at which the device would have done them.
        disk: which blobs it holds.
        meter: reads its log.
        timing: tells how long it needs.
        blobs: the store of the server.
        clock: logical seconds.
        agenda: what happens later.
        say: called with each message to the server.
        count: called with the bytes of each blob that it has fetched.
    """

    settings: AgentSettings
    work: ClientWork
    disk: EmulatedDisk
    meter: Meter
    timing: Timing
    blobs: Blobs
    clock: LogicalClock
    agenda: Agenda
    say: Callable[[Message], None]
    count: Callable[[int], None]
    _state: AgentState = field(default_factory=AgentState)
    _heard: RoundInfo | None = None
    _reading: Reading | None = None
    _log_starts_s: float = 0.0
    _link_free_s: float = 0.0
    _under_way: dict[str, int] = field(default_factory=dict)

    @property
    def log_time_s(self) -> float:
        """The time of its log: it goes on from the time that the round announced."""
        return max(0.0, self._log_starts_s + self.clock())

    def join(self) -> None:
        """Announce itself."""
        self._handle(LinkUp())

    def catch_up(self, measured: RoundInfo | None, heard: RoundInfo | None, log_starts_s: float) -> None:
        """Know what an agent without a task has missed.

        Args:
            measured: the last announcement that was answered for it.
            heard: the last announcement.
            log_starts_s: the time of its log at logical time 0, unless rounds are asynchronous.
        """
        self._heard = heard
        if heard is None or not heard.asynchronous:
            self._log_starts_s = log_starts_s
        if measured is not None:
            self._reading = self.meter.read(measured.log_time_s)[1]

    @property
    def record(self) -> AgentRecord:
        """What it knows after a restart."""
        state = self._state
        return AgentRecord(
            done=state.done, programs=state.programs, frozen=state.frozen, held_bytes=self.disk.held_bytes
        )

    def restart(self, record: AgentRecord) -> None:
        """Know what it knew, beside what is on its disk."""
        self._state = replace(self._state, done=record.done, programs=record.programs, frozen=record.frozen)

    @property
    def idle(self) -> bool:
        """Whether it has no task and nothing that it waits for."""
        return self._state.current is None and self._state.running is None and not self._state.pending

    def receive(self, message: Message) -> None:
        """React to a message of the server.

        Most members of a large fleet only answer announcements. A member without a task does so without a step of the
        agent, which would expect an ack of the answer: here nothing is lost.
        """
        for_all = isinstance(message, RoundInfo) and message.asynchronous and message.phase != "measure"
        if isinstance(message, RoundInfo) and message.log_time_s is not None and not for_all:
            self._log_starts_s = message.log_time_s - self.clock()
        if isinstance(message, Task):
            self.work.expect(message)
        if not self.idle:
            self._handle(Received(message=message))
        elif isinstance(message, RoundInfo):
            self._heard = message
            if message.phase == "measure":
                self._answer(message)
        elif isinstance(message, Task):
            self._state = replace(self._state, round=self._heard, round_at_s=self.clock(), reading=self._reading)
            self.agenda.add(self.clock() + message.deadline_s, partial(self._handle, TimePassed()))
            self._handle(Received(message=message))

    def _answer(self, info: RoundInfo) -> None:
        """Answer an announcement with telemetry."""
        pinned = self._state.saved.pinned
        action = MeasureForRound(info=info, pinned=pinned)
        measured = measure(action, self.settings, info, self.meter, self.disk.measure_budget(pinned))
        self._reading = measured.reading
        self.say(compose_telemetry(self.settings, measured, self.clock()))

    def _handle(self, event: Event) -> None:
        events = deque([event])
        while events:
            self._state, actions = step(self.settings, self._state, events.popleft(), self.clock())
            for action in actions:
                events.extend(self._perform(action))

    def _perform(self, action: Action) -> Iterator[Event]:
        match action:
            case Publish() | Keep():
                self.say(action.message)
            case Weigh():
                yield self.disk.weigh(action)
            case Fetch():
                yield from self._fetch(action.blob)
            case MeasureForRound() | MeasureForTask() | MeasureRegularly():
                disk_bytes = self.disk.measure_budget(action.pinned) if isinstance(action, MeasureForRound) else None
                yield measure(action, self.settings, self._state.round, self.meter, disk_bytes)
            case StartWork():
                finish = self.work.begin(action.task, action.memory_limit_bytes)
                seconds = self.timing.work_s(action.task, self.log_time_s)
                # Even without a duration it is asked for later, when everybody has begun.
                self._schedule(action.task.task_id, seconds, partial(self._end, finish, seconds))
            case StopWork():
                yield from self._stop(action.task_id)
            case PlaceModels():
                yield _place_models(action.task)
            case CancelFetch():
                self._cancel(action.blob.sha256)
                if not self._under_way:
                    self._link_free_s = self.clock()
            case _:
                self._keep_up(action)

    def _keep_up(self, action: Prune | Settle | Save | Leave) -> None:
        match action:
            case Prune():
                self.disk.prune(action.keep)
            case Settle() | Save() | Leave():
                pass  # nothing is sent twice, or kept beyond the run
            case _:
                never(action)

    def _later(self, name: str, seconds: float, find_event: Callable[[], Event]) -> Iterator[Event]:
        """Handle an event once it has taken its time; without any, it is returned."""
        if seconds:
            self._schedule(name, seconds, find_event)
        else:
            yield find_event()

    def _schedule(self, name: str, seconds: float, find_event: Callable[[], Event]) -> None:
        def happen() -> None:
            del self._under_way[name]
            self._handle(find_event())

        self._under_way[name] = self.agenda.add(self.clock() + seconds, happen)

    def _cancel(self, name: str) -> bool:
        number = self._under_way.pop(name, None)
        if number is not None:
            self.agenda.cancel(number)
        return number is not None

    def _fetch(self, blob: BlobRef) -> Iterator[Event]:
        """Fetch a blob once the fetches before it have ended."""
        seconds = 0.0
        if not self.disk.holds(blob):
            waits_s = max(0.0, self._link_free_s - self.clock())
            seconds = waits_s + self.timing.transfer_s("down", blob.size_bytes, self.log_time_s + waits_s)
            self._link_free_s = self.clock() + seconds
        yield from self._later(blob.sha256, seconds, partial(self._take, blob))

    def _take(self, blob: BlobRef) -> Event:
        if not self.blobs.has(blob):
            return BlobFailed(sha256=blob.sha256, reason="program", detail="the server does not have it any more")
        if self.disk.hold(blob):
            self.count(blob.size_bytes)
        return BlobArrived(sha256=blob.sha256)

    def _end(self, finish: Callable[[], Outcome | TrainingEnded], seconds: float) -> Event:
        ended = store_output(finish(), self.blobs)
        if isinstance(ended, TrainingEnded):
            ended = replace(ended, result=replace(ended.result, train_seconds=seconds))
        return ended

    def _stop(self, task_id: str) -> Iterator[Event]:
        if self._cancel(task_id):
            yield WorkFailed(task_id=task_id, reason="failed", detail="the training was stopped")


def _place_models(task: Task) -> Event:
    try:
        return ModelsPlaced(task_id=task.task_id, files=name_models(task))
    except ProtocolError as error:
        return WorkFailed(task_id=task.task_id, reason="program", detail=str(error))
