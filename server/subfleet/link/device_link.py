"""The server's link to its devices: messages in and out, tasks until their acks, blobs in both directions."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import cast, get_args

from subfleet.link.base import Connect
from subfleet.link.traffic import Traffic
from subfleet.protocol.blobs import Chunk, decode_chunk
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import (
    Ack,
    BlobMissing,
    ChunkRequest,
    Claim,
    RoundInfo,
    Task,
    Telemetry,
    Update,
    decode,
    encode,
)
from subfleet.protocol.plausible import plausible
from subfleet.protocol.topics import CHUNK, Address, Topics
from subfleet.rounds.signals import FromDevice
from subfleet.transport.base import Connected, Delivery, Disconnected, Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.complaints import Complaints
from subfleet.transport.counting import CountingTransport, Direction
from subfleet.transport.exchange import BlobExchange, Fetched
from subfleet.transport.outbox import Outbox

_LOG = logging.getLogger(__name__)
_MESSAGES_PER_STEP = 256
_REPEAT_S = 2.0
"""An announcement is repeated, since a transport may lose it and no ack answers it."""
Control = FromDevice | Ack | ChunkRequest | BlobMissing
"""The control messages that a device may send."""
Incoming = Control | Chunk
_KINDS = frozenset(message.KIND for message in get_args(Control))
_NOBODY = "a sender without an id"


def read_delivery(
    topics: Topics, delivery: Delivery, complain: Callable[[str, str], None]
) -> tuple[str, Incoming] | None:
    """The sender and its message; None, with a complaint about the sender, if it is invalid.

    A device can only speak for itself: the id in a message must be the one in its topic, which a broker's access list
    guards. Retained messages are dropped, since they may be old; present devices repeat theirs with the next heartbeat.
    """
    if delivery.retained or not delivery.payload:  # an empty payload clears a retained message
        return None
    sender = _NOBODY
    try:
        address = topics.parse(delivery.topic)
        sender = address.client_id or _NOBODY
        return _read(address, delivery)
    except ProtocolError as error:
        complain(sender, f"dropped a message on {delivery.topic[:120]}: {error}")
        return None


def _read(address: Address, delivery: Delivery) -> tuple[str, Incoming] | None:
    if address.direction != "up":
        raise ProtocolError(f"topic {delivery.topic!r:.120} is not a topic of devices")
    if address.kind == Claim.KIND:
        return None  # devices with the same id settle that among themselves
    if address.kind == CHUNK:
        return address.client_id, decode_chunk(delivery.payload)
    if address.kind not in _KINDS:
        raise ProtocolError(f"devices do not send messages of kind {address.kind!r:.80}")
    message = cast("Control", decode(delivery.payload, expected=address.kind))
    speaker = getattr(message, "client_id", address.client_id)
    if speaker != address.client_id:
        raise ProtocolError(f"client {address.client_id} has sent a message in the name of client {speaker!r:.80}")
    return address.client_id, plausible(message)


class DeviceLink:
    """Sends and receives for one server. It belongs to the thread of the loop and never waits longer than it is told.

    Args:
        fleet: name of the fleet.
        transport: the link to the broker, not opened yet.
        blobs: where blobs are served from, and pulled into.
        sizes: of the chunks that come through the broker.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        fleet: str,
        transport: Transport,
        blobs: BlobStore,
        *,
        sizes: ChunkSizes | None,
        clock: Callable[[], float],
    ) -> None:
        self._topics = topics = Topics(fleet)
        self._clock = clock
        self.traffic = Traffic()
        self._transport = CountingTransport(transport, on_payload=self._count)
        self._complaints = Complaints(_LOG, clock)
        self._exchange = BlobExchange(
            blobs,
            complain=self._complaints.note,
            request_topic=lambda peer: topics.downlink(peer, "request"),
            chunk_topic=lambda peer: topics.downlink(peer, "chunk"),
            missing_topic=lambda peer: topics.downlink(peer, "missing"),
            sizes=sizes,
        )
        self._uploads: dict[str, Update] = {}  # by task, the updates that are being pulled
        self._outbox = Outbox()
        self._receivers: dict[str, str] = {}  # of the tasks in the outbox
        self._asked: dict[str, tuple[RoundInfo, float]] = {}  # by client, with the end of the deadline
        self._announced = ""
        self._announce_s = 0.0

    @property
    def digests(self) -> frozenset[str]:
        """Digests of the blobs that are being pulled."""
        return frozenset(update.blob.sha256 for update in self._uploads.values())

    def open(self) -> None:
        """Connect.

        Raises:
            TransportError: the broker cannot be reached.
        """
        self._transport.open((self._topics.uplink("+", "+"),))

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()

    def receive(self, timeout_s: float) -> Iterator[FromDevice]:
        """The messages of devices to the run: waits up to `timeout_s` seconds for the first, then yields all."""
        for number in range(_MESSAGES_PER_STEP):
            event = self._transport.poll(0.0 if number else timeout_s)
            if event is None:
                return
            yield from self._receive(event)

    def pull_updates(self) -> Iterator[Update]:
        """The updates with blobs that have arrived since the last call; a client offers one that failed again."""
        for result in self._exchange.take_results():
            offers = [
                offer for offer in self._uploads.values() if offer.client_id == result.peer and offer.blob == result.ref
            ]
            for offer in offers:
                del self._uploads[offer.task_id]
                if not isinstance(result, Fetched):
                    self._complaints.note(offer.client_id, f"its update cannot be fetched: {result.detail}")
            if isinstance(result, Fetched):
                yield from offers

    def ask(self, client_id: str, info: RoundInfo) -> None:
        """Send one client an announcement until its telemetry arrives, or the announcement's deadline is over."""
        self._asked[client_id] = info, self._clock() + info.deadline_s
        self._outbox.put(_name_question(client_id), self._topics.downlink(client_id, "round"), encode(info))

    def send_task(self, task: Task) -> None:
        """Send a task repeatedly until its client acknowledges it."""
        self._receivers[task.message_id] = task.client_id
        topic = self._topics.downlink(task.client_id, "task")
        self._outbox.put(task.message_id, topic, encode(task), retain=True)

    def withdraw(self, task_id: str) -> None:
        """Stop sending a task, and drop what has arrived of its update."""
        self._settle(task_id)
        self._drop(task_id)

    def reply(self, client_id: str, ack: Ack) -> None:
        """Send an ack, once."""
        self._transport.publish(self._topics.downlink(client_id, "ack"), encode(ack))

    def pull(self, update: Update) -> None:
        """Begin to pull an update's blob; `pull_updates` yields the update when it has arrived.

        A client has one open task, and an update may not be much larger than the weights of its task. So the bytes that
        a client can make the server write unchecked are bounded, however often it changes its update.
        """
        older = self._uploads.get(update.task_id)
        if older is not None and older.blob != update.blob:
            self._drop(update.task_id)
        self._uploads[update.task_id] = update
        self._exchange.fetch(update.client_id, update.blob)

    def send(self, info: RoundInfo | None) -> None:
        """Send what is due: chunks, tasks without an ack, and the announcement of the round."""
        now_s = self._clock()
        for client_id in [client_id for client_id, (_, until_s) in self._asked.items() if now_s >= until_s]:
            self._stop_asking(client_id)
        for outgoing in (*self._exchange.tick(now_s), *self._outbox.list_due(now_s)):
            self._transport.publish(outgoing.topic, outgoing.payload, retain=outgoing.retain)
        if info is not None and (info.message_id != self._announced or now_s >= self._announce_s):
            self._announced, self._announce_s = info.message_id, now_s + _REPEAT_S
            self._transport.publish(self._topics.all("round"), encode(info), retain=True)
        self._complaints.tick()

    def _receive(self, event: Connected | Disconnected | Delivery) -> Iterator[FromDevice]:
        if isinstance(event, Connected):
            self._exchange.resume(event.message_bytes)
            self._outbox.resend_all()
            self._announced = ""  # earlier announcements may be lost
        elif isinstance(event, Disconnected):
            _LOG.warning("the link to the broker is down: %s", event.reason)
        elif (read := read_delivery(self._topics, event, self._complaints.note)) is not None:
            yield from self._handle(*read)

    def _handle(self, client_id: str, incoming: Incoming) -> Iterator[FromDevice]:
        match incoming:
            case Ack():
                # A device acknowledges its own task; the ids of others' tasks are no secret.
                if self._receivers.get(incoming.of) == client_id:
                    self._settle(incoming.of)
            case ChunkRequest():
                self._exchange.handle_request(client_id, incoming)
            case Chunk():
                self._exchange.handle_chunk(client_id, incoming)
            case BlobMissing():
                self._exchange.handle_missing(client_id, incoming)
            case _:
                if isinstance(incoming, Telemetry):
                    self._note_telemetry(incoming)
                yield incoming

    def _note_telemetry(self, telemetry: Telemetry) -> None:
        info, _ = self._asked.get(telemetry.client_id, (None, 0.0))
        if info is not None and (telemetry.round, telemetry.attempt) == (info.round, info.attempt):
            self._stop_asking(telemetry.client_id)

    def _stop_asking(self, client_id: str) -> None:
        del self._asked[client_id]
        self._outbox.settle(_name_question(client_id))

    def _count(self, direction: Direction, topic: str, size_bytes: int) -> None:
        """Count a payload, unless it belongs to no client."""
        try:
            client_id = self._topics.parse(topic).client_id
        except ProtocolError:
            return
        if client_id:
            self.traffic.count(client_id, direction, size_bytes)

    def _drop(self, task_id: str) -> None:
        """Delete what has arrived of a task's update."""
        offer = self._uploads.pop(task_id, None)
        if offer is not None:
            self._exchange.cancel(offer.blob, peer=offer.client_id)

    def _settle(self, task_id: str) -> None:
        self._outbox.settle(task_id)
        self._receivers.pop(task_id, None)


def _name_question(client_id: str) -> str:
    return f"question/{client_id}"


def connect_devices(
    fleet: str,
    transport: Transport,
    *,
    sizes: ChunkSizes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Connect:
    """Create links to the devices of a fleet over a broker; see `DeviceLink`."""
    return lambda blobs: DeviceLink(fleet, transport, blobs, sizes=sizes, clock=clock)
