"""The Transport seam: topics and bytes, and as few promises as real brokers keep.

A transport may lose, double, reorder or delay a message, and may have acknowledged one that it then drops. What it does
promise, and its contract tests state: a payload that arrives is the payload that was sent; a retained message reaches
later subscribers unless it was lost, or the broker keeps none; after every `Connected` the caller's subscriptions are
in place; `publish` never waits for the network; `poll` never waits longer than it is told; a payload above the limit
is refused by `publish`.
Everything stronger is made above it: acks (`outbox`) and pulled chunks (`exchange`).
"""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["MAX_PAYLOAD_BYTES", "Connected", "Delivery", "Disconnected", "Event", "Transport", "Will"]

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload that a transport takes or delivers; chunks and control messages are well below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The link is up, for the first time or again: publish retained state and whatever lacks its ack.

    Attributes:
        message_bytes: what a message may be long with all that MQTT adds, where the broker has said so.
    """

    message_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The link is down; the transport tries to mend it by itself."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message from the broker."""

    topic: str
    payload: bytes
    retained: bool = False


Event = Connected | Disconnected | Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """What the broker may publish, retained, when this client vanishes."""

    topic: str
    payload: bytes


class Transport(Protocol):
    """One client's link to a broker. `publish` may be called from any thread, everything else from one."""

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """Connect and subscribe.

        Raises:
            TransportError: the broker cannot be reached or refuses us; the text says what to do.
        """
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send, at some time, perhaps.

        Raises:
            TooLargeError: the payload is above MAX_PAYLOAD_BYTES.
        """
        ...

    def poll(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s` seconds without one."""
        ...

    def close(self) -> None:
        """Disconnect without the will; does nothing the second time."""
        ...
