"""Limits the speed of a transport, for emulated devices that replay the bandwidth of a real device."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from subfleet.transport.base import MAX_PAYLOAD_BYTES, Delivery, Disconnected, Event, Transport, Will

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 0.05  # the longest delay of a message from another thread while `poll` waits
_MAX_QUEUED_BYTES = 256 * MAX_PAYLOAD_BYTES
_MESSAGE_BYTES = 64  # TCP, IP and MQTT headers of a message, so that empty messages take time too


class Lane(Generic[T]):
    """One direction of a link: a first-in first-out queue that drains at a rate. Pure; times are seconds.

    An item comes out when its last bit has passed. An idle link saves no credit, so that no burst is faster than the
    link.
    """

    def __init__(self) -> None:
        self._rate_bps: float | None = None
        self._items: deque[T] = deque()
        self._sizes_bits: deque[float] = deque()
        self._passed_until_s = -math.inf
        self._ready: deque[T] = deque()
        self.queued_bits = 0.0

    def set_rate(self, now_s: float, rate_bps: float | None) -> None:
        """Change the rate, in bits per second; None means no limit, 0 lets nothing pass."""
        if rate_bps is not None and not rate_bps >= 0:
            raise ValueError(f"a rate is {rate_bps} bits per second, but must be 0 or more, or None for no limit")
        self._advance(now_s)
        self._rate_bps = rate_bps

    def put(self, now_s: float, size_bytes: int, item: T) -> None:
        """Queue an item."""
        self._advance(now_s)
        self._items.append(item)
        self._sizes_bits.append(8.0 * size_bytes)
        self.queued_bits += 8.0 * size_bytes

    def take(self, now_s: float) -> T | None:
        """Take the next item that has passed completely, or None."""
        self._advance(now_s)
        return self._ready.popleft() if self._ready else None

    def due_s(self, now_s: float) -> float:
        """Compute the seconds until the next item has passed: 0 if one is ready, infinite if none can."""
        self._advance(now_s)
        if self._ready or (self._items and self._rate_bps is None):
            return 0.0
        return self._sizes_bits[0] / self._rate_bps if self._items and self._rate_bps else math.inf

    def clear(self) -> None:
        """Drop everything that has not passed."""
        self._items.clear()
        self._sizes_bits.clear()
        self.queued_bits = 0.0

    def _advance(self, now_s: float) -> None:
        elapsed_s = max(now_s - self._passed_until_s, 0.0) if self._items else 0.0
        self._passed_until_s = max(now_s, self._passed_until_s)
        credit_bits = math.inf if self._rate_bps is None else elapsed_s * self._rate_bps
        # A millionth of a bit is rounding of the clock; without it an item could be due in 0 seconds endlessly.
        while self._items and credit_bits >= self._sizes_bits[0] - 1e-6:
            size_bits = self._sizes_bits.popleft()
            credit_bits -= size_bits
            self.queued_bits -= size_bits
            self._ready.append(self._items.popleft())
        if self._items:
            self._sizes_bits[0] -= credit_bits
            self.queued_bits -= credit_bits


class PacedTransport:
    """Delays messages in both directions like a link with given rates; their order stays.

    `publish` sends at once if the link is idle and unlimited, else it queues; `poll` advances the queues, so a caller
    must poll steadily, as every session does. Queued messages are lost when the link breaks, as on a real link.

    Args:
        inner: the transport that carries the messages.
        clock: seconds, monotonic.
    """

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._lock = threading.RLock()
        self._up: Lane[tuple[str, bytes, bool]] = Lane()
        self._down: Lane[Event] = Lane()

    def set_rates(self, downlink_bps: float | None, uplink_bps: float | None) -> None:
        """Change both rates, in bits per second; None means no limit, 0 lets nothing pass. Callable from any thread.

        Raises:
            ValueError: a rate is below 0.
        """
        with self._lock:
            now_s = self._clock()
            self._down.set_rate(now_s, downlink_bps)
            self._up.set_rate(now_s, uplink_bps)

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
            self._up.put(self._clock(), size_bytes, (topic, bytes(payload), retain))
            self._send_passed()

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        # As in the memory broker: a timeout is in real time, whatever the clock is.
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._send_passed()
                self._receive_waiting()
                event = self._down.take(self._clock())
                if event is not None:
                    return event
                due_s = min(self._up.due_s(self._clock()), self._down.due_s(self._clock()))
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
            self._up.set_rate(self._clock(), None)
            self._send_passed()
        self._inner.close()

    def _receive_waiting(self) -> None:
        while (event := self._inner.poll(0)) is not None:
            self._receive(event)

    def _receive(self, event: Event) -> None:
        size_bytes = len(event.payload) + len(event.topic) + _MESSAGE_BYTES if isinstance(event, Delivery) else 0
        if isinstance(event, Disconnected):
            self._up.clear()
            self._down.clear()
        self._down.put(self._clock(), size_bytes, event)

    def _send_passed(self) -> None:
        while (item := self._up.take(self._clock())) is not None:
            topic, payload, retain = item
            self._inner.publish(topic, payload, retain=retain)
