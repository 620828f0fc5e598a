"""The agent's only loop: turns messages and results into events, and performs the agent's actions."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.agent.actions import (
    Action,
    CancelFetch,
    Fetch,
    Keep,
    Leave,
    Measure,
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
from subfleet.agent.composing import compose_presence
from subfleet.agent.events import (
    BlobArrived,
    BlobFailed,
    Event,
    LinkDown,
    LinkUp,
    Received,
    Stopping,
    TimePassed,
)
from subfleet.agent.outcomes import ModelsPlaced, WorkFailed
from subfleet.agent.states import AgentSettings
from subfleet.agent.stepping import start, step
from subfleet.device.meters import Meter
from subfleet.edge_client.measuring import measure
from subfleet.edge_client.message_log import ReceivedLog, log_answer
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.task_work import TaskWorker, store_output
from subfleet.protocol.blobs import decode_chunk
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import BlobMissing, ChunkRequest, RefusalReason, decode, encode
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Connected, Delivery, Disconnected, Transport, Will
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.complaints import Complaints
from subfleet.transport.exchange import BlobExchange, Fetched
from subfleet.transport.outbox import Outbox, Outgoing

_LOG = logging.getLogger(__name__)

SERVER = "server"
_MAX_DELIVERIES_A_TURN = 64
_FETCH_REASONS: Mapping[str, RefusalReason] = MappingProxyType(
    {"missing": "program", "digest": "program", "stalled": "link", "too_large": "disk", "storage": "disk"}
)
"""By the reason of a failed fetch, the reason to refuse its task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The parts of a device that a session works with.

    Attributes:
        store: the agent's folder, locked by the caller.
        worker: does its tasks.
        meter: reads the device's resources.
        sizes: the chunk sizes that its broker accepts.
    """

    store: AgentStore
    worker: TaskWorker
    meter: Meter
    sizes: ChunkSizes = field(default_factory=ChunkSizes)


class EdgeSession:
    """One session of the agent, from start to end of the process.

    Args:
        settings: the agent's settings.
        transport: the transport, not yet open.
        topics: the fleet's topics.
        device: its folder, worker and meter.
        clock: seconds, monotonic.
        retry_s: how long to wait for an ack or a chunk before repeating a message or request.
    """

    def __init__(
        self,
        settings: AgentSettings,
        transport: Transport,
        topics: Topics,
        device: Device,
        *,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = 2.0,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._topics = topics
        self._store = device.store
        self._worker = device.worker
        self._meter = device.meter
        self._clock = clock
        self._connected = False
        self._left = False
        self._outbox = Outbox(retry_s)
        up = topics.uplink
        client_id = settings.client_id
        self._complaints = Complaints(_LOG, clock)
        self._exchange = BlobExchange(
            device.store.blobs,
            complain=self._complaints.note,
            request_topic=lambda _peer: up(client_id, ChunkRequest.KIND),
            chunk_topic=lambda _peer: up(client_id, CHUNK),
            missing_topic=lambda _peer: up(client_id, BlobMissing.KIND),
            sizes=device.sizes,
            retry_s=retry_s,
        )
        self._received = ReceivedLog(settings)
        self._events: deque[Event] = deque()
        self._state, actions = start(settings, device.store.load(), clock())
        self._perform(actions)

    @property
    def left(self) -> bool:
        """Whether the run is finished and the agent has left."""
        return self._left

    def run(self, stopped: Callable[[], bool], *, poll_s: float = 0.1) -> None:
        """Take part until the run is finished or `stopped` returns True.

        Raises:
            TransportError: the broker cannot be reached at the start.
            FileError: the state folder cannot be written.
        """
        self.open()
        try:
            while not (stopped() or self._left):
                self.turn(poll_s)
        finally:
            self.close()

    def open(self) -> None:
        """Connect.

        Raises:
            TransportError: the broker cannot be reached.
        """
        client_id = self._settings.client_id
        farewell = compose_presence(self._settings, self._clock(), online=False)
        will = Will(topic=self._topics.uplink(client_id, farewell.KIND), payload=encode(farewell))
        self._transport.open((self._topics.all("+"), self._topics.downlink(client_id, "+")), will)

    def turn(self, poll_s: float) -> None:
        """Handle all arrived events, wait at most `poll_s` seconds for one, and send due messages."""
        event = self._transport.poll(poll_s)
        remaining = _MAX_DELIVERIES_A_TURN
        while event is not None:
            self._on_transport(event)
            remaining -= 1
            event = self._transport.poll(0) if remaining else None
        self._collect_outcome()
        self._collect_blobs()
        self._handle(TimePassed())
        self._send_due()
        self._complaints.tick()

    def close(self) -> None:
        """Disconnect and stop the worker; the next start repeats an unfinished task."""
        try:
            # A task that ended by itself is reported, even if the system killed it and then stopped this process.
            self._collect_outcome()
            self._handle(Stopping())
        except FileError as error:
            # The next start will count this as a crash during the task; no result is lost.
            _LOG.warning("the stop of the task cannot be saved: %s", error)
        self._worker.stop()
        if self._connected:
            reason = "the run is finished" if self._left else "it was stopped"
            # A server of an earlier release does not know reasons, and uses the first one.
            self._send(Publish(message=compose_presence(self._settings, self._clock(), online=False), retain=True))
            self._send(Publish(message=compose_presence(self._settings, self._clock(), online=False, reason=reason)))
        self._transport.close()
        self._worker.join(timeout_s=5.0)

    # --- events ---

    def _on_transport(self, event: Connected | Disconnected | Delivery) -> None:
        if isinstance(event, Connected):
            _LOG.info("connected as %s", self._settings.client_id)
            self._connected = True
            self._outbox.resend_all()
            self._exchange.resume(event.message_bytes)
            self._handle(LinkUp())
        elif isinstance(event, Disconnected):
            _LOG.warning("the link to the broker is down: %s", event.reason)
            self._connected = False
            self._handle(LinkDown())
        elif event.payload:  # an empty one clears a retained message
            try:
                self._on_delivery(event)
            except ProtocolError as error:
                self._complaints.note(SERVER, f"dropped a message on {event.topic}: {error}")

    def _on_delivery(self, delivery: Delivery) -> None:
        kind = self._topics.parse(delivery.topic).kind
        if kind == CHUNK:
            self._meter.note_transfer("down", len(delivery.payload), self._clock())
            self._exchange.handle_chunk(SERVER, decode_chunk(delivery.payload))
            return
        message = decode(delivery.payload, expected=kind)
        if isinstance(message, ChunkRequest):
            self._meter.note_transfer("up", sum(requested.length for requested in message.ranges), self._clock())
            self._exchange.handle_request(SERVER, message)
        elif isinstance(message, BlobMissing):
            self._exchange.handle_missing(SERVER, message)
        else:
            self._received.note(message)
            self._handle(Received(message=message))

    def _collect_outcome(self) -> None:
        outcome = self._worker.outcome()
        if outcome is not None:
            self._handle(store_output(outcome, self._store.blobs))

    def _collect_blobs(self) -> None:
        for result in self._exchange.take_results():
            if isinstance(result, Fetched):
                self._handle(BlobArrived(sha256=result.ref.sha256))
            else:
                reason = _FETCH_REASONS[result.reason]
                self._handle(BlobFailed(sha256=result.ref.sha256, reason=reason, detail=result.detail))

    def _handle(self, event: Event) -> None:
        self._events.append(event)
        while self._events:
            self._state, actions = step(self._settings, self._state, self._events.popleft(), self._clock())
            self._perform(actions)

    # --- actions ---

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Publish():
                self._send(action)
            case Keep():
                self._keep(action)
            case Settle():
                self._outbox.settle(action.message_id)
            case Fetch():
                self._fetch(action)
            case CancelFetch():
                self._exchange.cancel(action.blob)
            case MeasureForRound() | MeasureForTask() | MeasureRegularly():
                self._measure(action)
            case StartWork():
                data_bytes = self._settings.data_bytes_in(self._state.round)
                self._worker.start(action.task, action.memory_limit_bytes, data_bytes)
            case StopWork():
                self._worker.stop()
            case Leave():
                self._left = True
            case _:
                self._do_on_disk(action)

    def _do_on_disk(self, action: Save | Prune | Weigh | PlaceModels) -> None:
        match action:
            case Save():
                self._store.save(action.saved)
            case Prune():
                self._prune(action)
            case Weigh():
                self._weigh(action)
            case PlaceModels():
                self._place_models(action)
            case _:
                never(action)

    def _send(self, action: Publish) -> None:
        topic = self._topics.uplink(self._settings.client_id, action.message.KIND)
        self._transport.publish(topic, encode(action.message), retain=action.retain)

    def _keep(self, action: Keep) -> None:
        message = action.message
        log_answer(message)
        topic = self._topics.uplink(self._settings.client_id, message.KIND)
        self._outbox.put(message.message_id, topic, encode(message))

    def _weigh(self, action: Weigh) -> None:
        try:
            self._events.append(self._store.weigh(action))
        except FileError as error:
            self._events.append(WorkFailed(task_id=action.task.task_id, reason="disk", detail=str(error)))

    def _fetch(self, action: Fetch) -> None:
        try:
            self._store.drop_damaged(action.blob)
        except FileError as error:
            self._events.append(BlobFailed(sha256=action.blob.sha256, reason="disk", detail=str(error)))
            return
        self._exchange.fetch(SERVER, action.blob)

    def _measure(self, action: Measure) -> None:
        disk_bytes = self._disk_budget_bytes(action.pinned) if isinstance(action, MeasureForRound) else None
        self._events.append(measure(action, self._settings, self._state.round, self._meter, disk_bytes))

    def _disk_budget_bytes(self, pinned: Set[str]) -> int | None:
        try:
            return self._store.disk_budget_bytes(pinned)
        except FileError as error:
            _LOG.warning("the free disk space cannot be determined: %s", error)
            return None

    def _place_models(self, action: PlaceModels) -> None:
        task_id = action.task.task_id
        try:
            self._events.append(ModelsPlaced(task_id=task_id, files=self._store.place_models(action.task)))
        except FileError as error:
            self._events.append(WorkFailed(task_id=task_id, reason="disk", detail=str(error)))
        except ProtocolError as error:
            self._events.append(WorkFailed(task_id=task_id, reason="program", detail=str(error)))

    def _prune(self, action: Prune) -> None:
        try:
            self._store.blobs.prune(set(action.keep))
        except OSError as error:
            # Leftover blobs only take space until the next pruning; that is no reason to end.
            _LOG.warning("unused blobs cannot be removed: %s", error)

    def _send_due(self) -> None:
        if not self._connected:
            return
        now_s = self._clock()
        outgoing: tuple[Outgoing, ...] = (*self._outbox.list_due(now_s), *self._exchange.tick(now_s))
        for message in outgoing:
            self._transport.publish(message.topic, message.payload, retain=message.retain)
