"""The agent of an emulated device: the decisions of a real one, performed in the server's process.

Nothing is encoded, and blobs are read from the server's store, so that a client costs little more than its training.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from subfleet.agent.events import BlobArrived, BlobFailed, Event, LinkUp, Received, TimePassed
from subfleet.agent.outcomes import ModelsPlaced, WorkFailed
from subfleet.agent.states import AgentSettings, AgentState
from subfleet.agent.stepping import step
from subfleet.device.meters import Meter
from subfleet.edge_client.measuring import measure
from subfleet.edge_client.store import name_models
from subfleet.edge_client.task_work import TaskWork, store_output
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Message
from subfleet.protocol.task import Task
from subfleet.transport.blob_store import BlobStore


@dataclass(eq=False, kw_only=True)
class EmulatedAgent:
    """An agent whose actions are performed at once. Its work takes no logical time.

    Attributes:
        settings: of the agent.
        work: does its tasks.
        disk: which blobs it holds.
        meter: reads its log.
        blobs: the store of the server.
        say: called with each message to the server.
        count: called with the bytes of each blob that it fetches.
        stopped: whether the run is to end, asked between the steps of a training.
    """

    settings: AgentSettings
    work: TaskWork
    disk: EmulatedDisk
    meter: Meter
    blobs: BlobStore
    say: Callable[[Message], None]
    count: Callable[[int], None]
    stopped: Callable[[], bool]
    _state: AgentState = field(default_factory=AgentState)

    @property
    def due_s(self) -> float:
        """When it next sends something by itself."""
        return min(self._state.heartbeat_due_s, self._state.telemetry_due_s)

    def join(self, now_s: float) -> None:
        """Announce itself."""
        self._handle(LinkUp(), now_s)

    def receive(self, message: Message, now_s: float) -> None:
        """React to a message of the server."""
        self._handle(Received(message=message), now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self._handle(TimePassed(), now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        events = deque([event])
        while events:
            self._state, actions = step(self.settings, self._state, events.popleft(), now_s)
            for action in actions:
                events.extend(self._perform(action))

    def _perform(self, action: Action) -> Iterator[Event]:
        match action:
            case Publish() | Keep():
                self.say(action.message)
            case Weigh():
                yield self.disk.weigh(action)
            case Fetch():
                yield self._fetch(action.blob)
            case MeasureForRound() | MeasureForTask() | MeasureRegularly():
                disk_bytes = self.disk.measure_budget(action.pinned) if isinstance(action, MeasureForRound) else None
                yield measure(action, self.settings, self._state.round, self.meter, disk_bytes)
            case StartWork():
                yield store_output(self.work.do(action.task, action.memory_limit_bytes, self.stopped), self.blobs)
            case PlaceModels():
                yield _place_models(action.task)
            case Prune():
                self.disk.prune(action.keep)
            case Settle() | CancelFetch() | StopWork() | Save() | Leave():
                pass  # nothing is sent twice, underway, or kept beyond the run
            case _:
                never(action)

    def _fetch(self, blob: BlobRef) -> Event:
        if not self.blobs.has(blob):
            return BlobFailed(sha256=blob.sha256, reason="program", detail="the server does not have it any more")
        if self.disk.hold(blob):
            self.count(blob.size_bytes)
        return BlobArrived(sha256=blob.sha256)


def _place_models(task: Task) -> Event:
    try:
        return ModelsPlaced(task_id=task.task_id, files=name_models(task))
    except ProtocolError as error:
        return WorkFailed(task_id=task.task_id, reason="program", detail=str(error))
