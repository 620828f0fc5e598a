"""Finds out that two processes claim one place: two servers of a fleet, or two devices of one id.

A broker lets both in, as their ids there differ (`mqtt_client_id`). So whoever has a place says again and again on a
topic of the place who it is and since when, and listens there. Two words of somebody else, after its own has come back,
are of somebody who is alive: the one that came later leaves. One such word alone proves nothing, as a broker that was
started again may show what it had kept of a session of long ago.
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

__all__ = ["Lock", "LockingTransport", "make_device_lock", "make_server_lock"]

_LOG = logging.getLogger(__name__)
_PROOF = 2
_DEAF = 4  # so many words without one that came back; fewer may just be lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What only one process may be.

    Attributes:
        topic: where its holder speaks.
        holder: what it says of itself: the id of the device, the name of the run.
        lost: what one that came later ends with; `{other}` is what the first one says of itself.
        kept: what the first one tells of one that came later.
        silence_s: how long one that finds another's word says nothing else, so that the other can answer.
    """

    topic: str
    holder: str
    lost: str
    kept: str
    silence_s: float = 0.0


def make_device_lock(topics: Topics, client_id: str) -> Lock:
    """The place of a device, by its id."""
    return Lock(
        topic=topics.up(client_id, Claim.KIND),
        holder=client_id,
        lost="another device of the id {other!r} was in this fleet first; give this one another with --id, or stop it",
        kept="another device of the id {other!r} came to this fleet; it is to leave, as this one was first",
    )


def make_server_lock(topics: Topics, run: str) -> Lock:
    """The place of a fleet's server, whatever run it serves."""
    return Lock(
        topic=topics.all(Claim.KIND),
        holder=run,
        lost="run {other!r} serves this fleet on this broker already; choose another fleet, or stop that run",
        kept="another server, of run {other!r}, came to this fleet; it is to leave, as this one was first",
        silence_s=3.0,
    )


class LockingTransport:
    """A transport whose owner has a place that nobody else may have.

    `poll` raises TakenError when somebody was there before; nothing is sent from then on.

    Args:
        inner: what carries the messages.
        place: what is claimed.
        repeat_s: seconds between two words; a word may be lost.
        tell: is told once of each other that came later, and where our own words do not come back.
        clock: seconds, monotonic.
        unix_time: seconds since 1970: it alone says who was first, also between machines.
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
        self._next_word_s = 0.0
        self._unheard = 0
        self._established = False  # our own word has come back: who speaks now, speaks after us
        self._silent_until_s: float | None = None
        self._left = False
        self._words: dict[str, set[str]] = {}

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open((*subscriptions, self._lock.topic), will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        if self._left or (self._silent_until_s is not None and self._clock() < self._silent_until_s):
            _LOG.debug("dropped a message on %s: somebody else may have our place", topic)
            return
        self._inner.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`.

        Raises:
            TakenError: somebody else was in our place first.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._connected and self._clock() >= self._next_word_s:
                self._speak()
            event = self._inner.poll(max(0.0, deadline_s - time.monotonic()))
            if isinstance(event, (Connected, Disconnected)):
                self._connected, self._unheard = isinstance(event, Connected), 0
            if isinstance(event, Connected):
                self._speak()
            if not isinstance(event, Delivery) or event.topic != self._lock.topic:
                return event
            self._hear(event)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._connected and not self._left:
            self._inner.publish(self._lock.topic, b"", retain=True)
        self._left = True
        self._inner.close()

    def _speak(self) -> None:
        claim = Claim(session_id=self._session_id, holder=self._lock.holder, since_s=self._since_s)
        self._inner.publish(self._lock.topic, encode(claim), retain=True)
        self._next_word_s = self._clock() + self._repeat_s
        self._unheard += 1
        if self._unheard == _DEAF:
            self._tell(
                f"what is said on {self._lock.topic} does not come back: either another client has taken this one's "
                "place, or the broker's access list does not let it read there"
            )

    def _hear(self, delivery: Delivery) -> None:
        if not delivery.payload:
            return  # somebody has left
        try:
            claim = decode(delivery.payload, expected=Claim.KIND)
        except ProtocolError as error:
            _LOG.warning("dropped a message on %s: %s", delivery.topic, error)
            return
        if not isinstance(claim, Claim):
            return
        if claim.session_id == self._session_id:
            self._established, self._unheard = True, 0
        elif not self._established:
            if self._silent_until_s is None:
                self._silent_until_s = self._clock() + self._lock.silence_s
        else:
            self._weigh(claim)

    def _weigh(self, claim: Claim) -> None:
        words = self._words.setdefault(claim.session_id, set())
        if claim.message_id in words or len(words) == _PROOF:
            return
        words.add(claim.message_id)
        self._speak()  # the other one needs our word as we need its
        if len(words) < _PROOF:
            return
        if (claim.since_s, claim.session_id) < (self._since_s, self._session_id):
            self._left = True
            raise TakenError(self._lock.lost.format(other=claim.holder))
        self._tell(self._lock.kept.format(other=claim.holder))
