"""An in-process broker with configurable faults, for emulated fleets and for tests.

It uses the caller's clock: with a manual clock and `poll(0)` it is deterministic in one thread; with the real clock it
is thread-safe.
"""

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.errors import TooLargeError
from subfleet.protocol.limits import Amount, Fraction
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Event, Will
from subfleet.transport.topic_filter import matches


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Faults:
    """Faults, drawn from a seed for each pair of sender and receiver, in the sender's order.

    Attributes:
        seed: equal seeds and equal traffic give equal faults, however threads interleave.
        loss: probability, 0 to below 1, that a message is lost on its way to the broker, and again to each receiver.
        double: probability, 0 to 1, that a receiver gets a message twice.
        delay_s: each copy is delayed independently by up to this many seconds, so messages are reordered.
    """

    seed: int = 0
    loss: Annotated[float, Range(least=0, below=1)] = 0.0
    double: Fraction = 0.0
    delay_s: Amount = 0.0


@dataclass(slots=True, kw_only=True)
class BrokerLink:
    """A client's state at the broker; an opaque token to everyone else."""

    client_id: str
    subscriptions: tuple[str, ...]
    will: Will | None
    up: bool = True
    mend_at_s: float | None = None
    inbox: list[tuple[float, int, Event]] = field(default_factory=list)  # heap of (due, arrival number, event)


class MemoryBroker:
    """Routes messages between its clients.

    Args:
        faults: the faults to inject; none by default.
        clock: seconds, monotonic.
    """

    def __init__(self, faults: Faults | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults = faults or Faults()
        self._clock = clock
        self._links: dict[str, BrokerLink] = {}
        self._retained: dict[str, tuple[str, bytes]] = {}  # topic to sender and payload
        self._generators: dict[tuple[str, str], random.Random] = {}
        self._routes: dict[str, tuple[str, ...]] = {}  # topic to receivers; cleared whenever somebody subscribes
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def client(self, client_id: str) -> "MemoryTransport":
        """A transport for one client; it is not connected before `open`."""
        return MemoryTransport(self, client_id)

    def cut(self, client_id: str, *, mend_after_s: float | None = 0.0) -> None:
        """Break a client's link: messages in transit to it are lost, and its will is published.

        Args:
            client_id: the client; nothing happens if it has no link.
            mend_after_s: the client reconnects this many seconds later; None means not before `mend`.
        """
        with self._changed:
            link = self._links.get(client_id)
            if link is None or not link.up:
                return
            link.mend_at_s = None if mend_after_s is None else self._clock() + mend_after_s
            self._break(link, "the link was cut")

    def mend(self, client_id: str) -> None:
        """Let a client with a cut link reconnect now."""
        with self._changed:
            link = self._links.get(client_id)
            if link is not None and not link.up:
                link.mend_at_s = self._clock()
                self._changed.notify_all()

    def attach(self, client_id: str, subscriptions: tuple[str, ...], will: Will | None) -> BrokerLink:
        """Connect a client (`MemoryTransport.open`). A second client of the same id replaces the first."""
        with self._changed:
            old = self._links.get(client_id)
            if old is not None and old.up:
                self._break(old, "another client took this client's id")
            link = BrokerLink(client_id=client_id, subscriptions=subscriptions, will=will)
            self._links[client_id] = link
            self._connect(link)
            return link

    def detach(self, link: BrokerLink) -> None:
        """Disconnect a client without its will (`MemoryTransport.close`)."""
        with self._changed:
            link.up, link.mend_at_s = False, None
            if self._links.get(link.client_id) is link:
                del self._links[link.client_id]
                self._routes.clear()
            self._changed.notify_all()

    def publish(self, link: BrokerLink, topic: str, payload: bytes, *, retain: bool) -> None:
        """Route a client's message (`MemoryTransport.publish`); without a link it is lost."""
        with self._changed:
            if link.up and self._draw(link.client_id, "") >= self.faults.loss:
                self._route(link.client_id, topic, payload, retain=retain)
                self._changed.notify_all()

    def poll(self, link: BrokerLink, timeout_s: float) -> Event | None:
        """A client's next event (`MemoryTransport.poll`)."""
        # The timeout is in real time: a manual clock would never reach it.
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = self._clock()
                if not link.up and link.mend_at_s is not None and link.mend_at_s <= now_s:
                    link.up = True
                    self._connect(link)
                if link.inbox and link.inbox[0][0] <= now_s:
                    return heapq.heappop(link.inbox)[2]
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                awaited = [entry[0] - now_s for entry in link.inbox[:1]]
                if not link.up and link.mend_at_s is not None:
                    awaited.append(link.mend_at_s - now_s)
                self._changed.wait(min([left_s, *awaited]))

    def _break(self, link: BrokerLink, reason: str) -> None:
        now_s = self._clock()
        link.up = False
        link.inbox = [entry for entry in link.inbox if entry[0] <= now_s]
        heapq.heapify(link.inbox)
        self._enqueue(link, Disconnected(reason=reason), now_s)
        if link.will is not None:
            self._route(link.client_id, link.will.topic, link.will.payload, retain=True)
        self._changed.notify_all()

    def _connect(self, link: BrokerLink) -> None:
        self._routes.clear()
        self._enqueue(link, Connected(), self._clock())
        for topic, (sender, payload) in self._retained.items():
            if any(matches(subscription, topic) for subscription in link.subscriptions):
                self._send(sender, link.client_id, Delivery(topic=topic, payload=payload, retained=True))
        self._changed.notify_all()

    def _route(self, sender: str, topic: str, payload: bytes, *, retain: bool) -> None:
        if retain:
            self._retained.pop(topic, None)
            if payload:  # an empty retained message clears its topic
                self._retained[topic] = (sender, payload)
        if topic not in self._routes:
            self._routes[topic] = tuple(
                client_id
                for client_id, link in self._links.items()
                if any(matches(subscription, topic) for subscription in link.subscriptions)
            )
        for receiver in self._routes[topic]:
            self._send(sender, receiver, Delivery(topic=topic, payload=payload))

    def _send(self, sender: str, receiver: str, delivery: Delivery) -> None:
        link, faults = self._links[receiver], self.faults
        if not link.up or self._draw(sender, receiver) < faults.loss:
            return
        copies = 2 if self._draw(sender, receiver) < faults.double else 1
        for _ in range(copies):
            self._enqueue(link, delivery, self._clock() + faults.delay_s * self._draw(sender, receiver))

    def _enqueue(self, link: BrokerLink, event: Event, due_s: float) -> None:
        heapq.heappush(link.inbox, (due_s, next(self._arrivals), event))

    def _draw(self, sender: str, receiver: str) -> float:
        pair = (sender, receiver)
        if pair not in self._generators:
            # Not for secrets: faults must be reproducible.
            self._generators[pair] = random.Random(f"{self.faults.seed}/{sender}/{receiver}")  # noqa: S311
        return self._generators[pair].random()


class MemoryTransport:
    """One client's link to a `MemoryBroker`; made by `MemoryBroker.client`."""

    def __init__(self, broker: MemoryBroker, client_id: str) -> None:
        self._broker = broker
        self._client_id = client_id
        self._link: BrokerLink | None = None

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._link = self._broker.attach(self._client_id, subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLargeError(f"a payload is {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES} bytes")
        if self._link is not None:
            self._broker.publish(self._link, topic, bytes(payload), retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        return None if self._link is None else self._broker.poll(self._link, timeout_s)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._link is not None:
            self._broker.detach(self._link)

    def drop_link(self) -> None:
        """Vanish like a device that loses power: the will is published, and the client does not reconnect."""
        self._broker.cut(self._client_id, mend_after_s=None)
