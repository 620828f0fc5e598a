"""Counts the payload bytes of a transport in each direction."""

import threading
from collections.abc import Callable
from typing import Literal

from subfleet.transport.base import Delivery, Event, Transport, Will

Direction = Literal["sent", "received"]
OnPayload = Callable[[Direction, str, int], None]


class CountingTransport:
    """A transport that counts payload bytes (topics and MQTT's own few bytes are not counted).

    Args:
        inner: the transport that carries the messages.
        on_payload: called with direction, topic and size in bytes of each message, in the thread that sends or polls;
            a server counts the traffic of each device with it. It must be quick and must not raise.
    """

    def __init__(self, inner: Transport, on_payload: OnPayload | None = None) -> None:
        self._inner = inner
        self._on_payload = on_payload
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._received_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Payload bytes handed to the inner transport."""
        with self._lock:
            return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        """Payload bytes that `poll` returned."""
        with self._lock:
            return self._received_bytes

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        self._inner.publish(topic, payload, retain=retain)
        with self._lock:
            self._sent_bytes += len(payload)
        if self._on_payload is not None:
            self._on_payload("sent", topic, len(payload))

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        event = self._inner.poll(timeout_s)
        if isinstance(event, Delivery):
            with self._lock:
                self._received_bytes += len(event.payload)
            if self._on_payload is not None:
                self._on_payload("received", event.topic, len(event.payload))
        return event

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()
