"""Slows a transport down to a link that changes, for emulated devices that replay the link of a real one."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from subfleet.transport.base import MAX_PAYLOAD_BYTES, Delivery, Disconnected, Event, Transport, Will

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 0.05  # the longest delay of a message from another thread while `poll` waits
_LEAST_STEP_S = 0.001
_MAX_QUEUED_BYTES = 256 * MAX_PAYLOAD_BYTES
_MESSAGE_BYTES = 64  # TCP, IP and MQTT headers of a message, so that empty messages take time too


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConditions:
    """What a link does at some time.

    Attributes:
        downlink_bps: bits per second towards the device; None means no limit, 0 lets nothing pass.
        uplink_bps: bits per second from the device, likewise.
        latency_s: of a round trip; a message takes half of it besides its bits.
        until_s: the time of the clock until which this holds.
    """

    downlink_bps: float | None = None
    uplink_bps: float | None = None
    latency_s: float = 0.0
    until_s: float = math.inf


class Lane(Generic[T]):
    """One direction of a link: a first-in first-out queue that drains at a rate. Pure; times are seconds.

    An item comes out when its last bit has passed and has travelled. An idle link saves no credit, so that no burst is
    faster than the link.
    """

    def __init__(self) -> None:
        self._rate_bps: float | None = None
        self._delay_s = 0.0
        self._items: deque[T] = deque()
        self._sizes_bits: deque[float] = deque()
        self._passed_until_s = -math.inf
        self._travelling: deque[tuple[float, T]] = deque()  # each with the time at which it arrives
        self.queued_bits = 0.0

    def set_rate(self, now_s: float, rate_bps: float | None, delay_s: float = 0.0) -> None:
        """Change the link.

        Args:
            now_s: time; what passed until then is counted at the rate before.
            rate_bps: bits per second; None means no limit, 0 lets nothing pass.
            delay_s: time that an item travels after its last bit has passed.

        Raises:
            ValueError: the rate is below 0.
        """
        if rate_bps is not None and not rate_bps >= 0:
            raise ValueError(f"a rate is {rate_bps} bits per second, but must be 0 or more, or None for no limit")
        self._advance(now_s)
        self._rate_bps, self._delay_s = rate_bps, delay_s

    def put(self, now_s: float, size_bytes: int, item: T) -> None:
        """Queue an item."""
        self._advance(now_s)
        self._items.append(item)
        self._sizes_bits.append(8.0 * size_bytes)
        self.queued_bits += 8.0 * size_bytes

    def take(self, now_s: float) -> T | None:
        """Take the next item that has arrived, or None."""
        self._advance(now_s)
        return self._travelling.popleft()[1] if self._travelling and self._travelling[0][0] <= now_s else None

    def due_s(self, now_s: float) -> float:
        """Compute the seconds until the next item arrives: 0 if one has, infinite if none can."""
        self._advance(now_s)
        if self._travelling:
            return max(self._travelling[0][0] - now_s, 0.0)
        if self._items and self._rate_bps is None:
            return self._delay_s
        return self._sizes_bits[0] / self._rate_bps + self._delay_s if self._items and self._rate_bps else math.inf

    def clear(self, now_s: float) -> None:
        """Drop everything that has not arrived."""
        self._items.clear()
        self._sizes_bits.clear()
        self._travelling = deque(entry for entry in self._travelling if entry[0] <= now_s)
        self.queued_bits = 0.0

    def empty(self) -> Iterator[T]:
        """Take everything, whether it has arrived or not."""
        yield from (item for _, item in self._travelling)
        yield from self._items
        self._travelling.clear()
        self.clear(-math.inf)

    def _advance(self, now_s: float) -> None:
        at_s, self._passed_until_s = self._passed_until_s, max(now_s, self._passed_until_s)
        while self._items:
            size_bits, rate_bps = self._sizes_bits[0], self._rate_bps
            credit_bits = math.inf if rate_bps is None else max(now_s - at_s, 0.0) * rate_bps
            # A millionth of a bit is rounding of the clock; without it an item could be due in 0 seconds endlessly.
            if credit_bits < size_bits - 1e-6:
                self._sizes_bits[0] -= credit_bits
                self.queued_bits -= credit_bits
                return
            at_s = min(at_s + size_bits / rate_bps, now_s) if rate_bps else at_s
            self.queued_bits -= self._sizes_bits.popleft()
            # An item never overtakes the one before it, which may have travelled longer.
            last_s = self._travelling[-1][0] if self._travelling else -math.inf
            self._travelling.append((max(at_s + self._delay_s, last_s), self._items.popleft()))


class PacedTransport:
    """Delays messages in both directions like a link that changes; their order stays.

    A rate counts for as long as it holds, also while a message passes. `publish` sends at once if the link is idle and
    unlimited, else it queues; `poll` advances the queues, so a caller must poll steadily, as every session does. Queued
    messages are lost when the link breaks, as on a real link.

    Args:
        inner: the transport that carries the messages.
        link: returns the conditions at a time of the clock. It is called with times that never decrease.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        inner: Transport,
        link: Callable[[float], LinkConditions],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._link = link
        self._clock = clock
        self._lock = threading.RLock()
        self._up: Lane[tuple[str, bytes, bool]] = Lane()
        self._down: Lane[Event] = Lane()
        self._followed_until_s = clock()

    def _follow(self) -> float:
        """Let pass what has passed until now, at the rates that held meanwhile; returns the time."""
        now_s = self._clock()
        while True:
            conditions = self._link(self._followed_until_s)
            delay_s = conditions.latency_s / 2
            self._down.set_rate(self._followed_until_s, conditions.downlink_bps, delay_s)
            self._up.set_rate(self._followed_until_s, conditions.uplink_bps, delay_s)
            if conditions.until_s >= now_s:
                self._followed_until_s = now_s
                return now_s
            # Rounding may put the end of a condition slightly before it ends.
            self._followed_until_s = min(max(conditions.until_s, self._followed_until_s + _LEAST_STEP_S), now_s)

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._inner.publish(topic, payload, retain=retain)  # which refuses it with the right words
            return
        with self._lock:
            if self._up.queued_bits > 8 * _MAX_QUEUED_BYTES:
                _LOG.warning(
                    "dropped a message on %s: the %d bytes that may be queued are waiting", topic, _MAX_QUEUED_BYTES
                )
                return
            size_bytes = len(payload) + len(topic) + _MESSAGE_BYTES
            self._up.put(self._follow(), size_bytes, (topic, bytes(payload), retain))
            self._send_passed()

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        # As in the memory broker: a timeout is in real time, whatever the clock is.
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                now_s = self._follow()
                self._send_passed()
                self._receive_waiting()
                event = self._down.take(now_s)
                if event is not None:
                    return event
                due_s = min(self._up.due_s(now_s), self._down.due_s(now_s))
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            arrived = self._inner.poll(max(min(left_s, due_s, _SLICE_S), 0.0))
            if arrived is not None:
                with self._lock:
                    self._receive(arrived)

    def close(self) -> None:
        """See `Transport.close`. Queued messages are sent first: they were published before."""
        with self._lock:
            for topic, payload, retain in self._up.empty():
                self._inner.publish(topic, payload, retain=retain)
        self._inner.close()

    def _receive_waiting(self) -> None:
        while (event := self._inner.poll(0)) is not None:
            self._receive(event)

    def _receive(self, event: Event) -> None:
        size_bytes = len(event.payload) + len(event.topic) + _MESSAGE_BYTES if isinstance(event, Delivery) else 0
        now_s = self._follow()
        if isinstance(event, Disconnected):
            self._up.clear(now_s)
            self._down.clear(now_s)
        self._down.put(now_s, size_bytes, event)

    def _send_passed(self) -> None:
        while (item := self._up.take(self._followed_until_s)) is not None:
            topic, payload, retain = item
            self._inner.publish(topic, payload, retain=retain)
