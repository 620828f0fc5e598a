"""Locks over a broker: detect two servers of one fleet, or two devices with one id.

A broker accepts both, as their MQTT client ids differ (`mqtt_client_id`). So the holder of a lock repeatedly publishes
a claim with its session and start time on the lock's topic, and subscribes to it. Two claims of another session,
received after its own claim came back, prove that the other process is alive: the later process leaves. A single claim
proves nothing, as a restarted broker may deliver the retained claim of an old session.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from subfleet.protocol.errors import ProtocolError, TakenError
from subfleet.protocol.identifiers import make_message_id
from subfleet.protocol.messages import Claim, decode, encode
from subfleet.protocol.topics import Topics
from subfleet.transport.base import Connected, Delivery, Disconnected, Event, Transport, Will

_LOG = logging.getLogger(__name__)
_PROOF = 2  # claims of another session that prove that it is alive
_DEAF = 4  # claims in a row that did not come back; fewer may simply be lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A role that only one process may have.

    Attributes:
        topic: where its holder publishes claims.
        holder: name of the process: the device's id, or the run.
        error: error message of the later process; `{other}` is the name of the first one.
        warning: log message of the first process about the later one, `{other}`.
        silence_s: how long a process that finds another claim publishes nothing else, so that the other can answer.
    """

    topic: str
    holder: str
    error: str
    warning: str
    silence_s: float = 0.0


def make_device_lock(topics: Topics, client_id: str) -> Lock:
    """Make the lock of a device, by its id."""
    return Lock(
        topic=topics.uplink(client_id, Claim.KIND),
        holder=client_id,
        error="another device with the id {other!r} joined this fleet first; choose another --id, or stop that device",
        warning="another device with the id {other!r} joined this fleet later; give it another id, or stop it",
    )


def make_server_lock(topics: Topics, run: str) -> Lock:
    """Make the lock of a fleet's server, whatever run it serves."""
    return Lock(
        topic=topics.all(Claim.KIND),
        holder=run,
        error="run {other!r} already serves this fleet on this broker; choose another fleet, or stop that run",
        warning="another server, of run {other!r}, joined this fleet later; give it another fleet, or stop it",
        silence_s=3.0,
    )


class LockingTransport:
    """A transport that holds a lock.

    `poll` raises TakenError if another process held the lock first; after that nothing is sent.

    Args:
        inner: the transport that carries the messages.
        lock: the lock to hold.
        repeat_s: seconds between two claims; a claim may be lost.
        tell: called with a message about each later process, and if our own claims are not received.
        clock: seconds, monotonic.
        unix_time: seconds since 1970; the earlier start time wins, also between machines.
    """

    def __init__(
        self,
        inner: Transport,
        lock: Lock,
        *,
        repeat_s: float = 5.0,
        tell: Callable[[str], None] = _LOG.warning,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._inner = inner
        self._lock = lock
        self._repeat_s = repeat_s
        self._tell = tell
        self._clock = clock
        self._session_id = make_message_id()
        self._since_s = unix_time()
        self._connected = False
        self._next_claim_s = 0.0
        self._unanswered = 0
        self._established = False  # our own claim has come back: other claims are later ones
        self._silent_until_s: float | None = None
        self._left = False
        self._claims: dict[str, set[str]] = {}

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open((*subscriptions, self._lock.topic), will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        if self._left or (self._silent_until_s is not None and self._clock() < self._silent_until_s):
            _LOG.debug("dropped a message on %s: another process may hold our lock", topic)
            return
        self._inner.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`.

        Raises:
            TakenError: another process held the lock first.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._connected and self._clock() >= self._next_claim_s:
                self._publish_claim()
            event = self._inner.poll(max(0.0, deadline_s - time.monotonic()))
            if isinstance(event, (Connected, Disconnected)):
                self._connected, self._unanswered = isinstance(event, Connected), 0
            if isinstance(event, Connected):
                self._publish_claim()
            if not isinstance(event, Delivery) or event.topic != self._lock.topic:
                return event
            self._handle_claim(event)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._connected and not self._left:
            self._inner.publish(self._lock.topic, b"", retain=True)
        self._left = True
        self._inner.close()

    def _publish_claim(self) -> None:
        claim = Claim(session_id=self._session_id, holder=self._lock.holder, since_s=self._since_s)
        self._inner.publish(self._lock.topic, encode(claim), retain=True)
        self._next_claim_s = self._clock() + self._repeat_s
        self._unanswered += 1
        if self._unanswered == _DEAF:
            self._tell(
                f"our own claims on {self._lock.topic} are not received: either another client has the same client id, "
                "or the broker's access list does not allow reading this topic"
            )

    def _handle_claim(self, delivery: Delivery) -> None:
        if not delivery.payload:
            return  # another process has left
        try:
            claim = decode(delivery.payload, expected=Claim.KIND)
        except ProtocolError as error:
            _LOG.warning("dropped a message on %s: %s", delivery.topic, error)
            return
        if not isinstance(claim, Claim):
            return
        if claim.session_id == self._session_id:
            self._established, self._unanswered = True, 0
        elif not self._established:
            if self._silent_until_s is None:
                self._silent_until_s = self._clock() + self._lock.silence_s
        else:
            self._compare(claim)

    def _compare(self, claim: Claim) -> None:
        claims = self._claims.setdefault(claim.session_id, set())
        if claim.message_id in claims or len(claims) == _PROOF:
            return
        claims.add(claim.message_id)
        self._publish_claim()  # the other process needs our claim, too
        if len(claims) < _PROOF:
            return
        if (claim.since_s, claim.session_id) < (self._since_s, self._session_id):
            self._left = True
            raise TakenError(self._lock.error.format(other=claim.holder))
        self._tell(self._lock.warning.format(other=claim.holder))
