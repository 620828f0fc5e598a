"""The Transport seam: topics and bytes, with only the guarantees that real brokers keep.

A transport may lose, duplicate, reorder or delay a message, and may drop one that it has acknowledged. It guarantees,
and its contract tests check: a payload that arrives is unchanged; a retained message reaches later subscribers unless
it was lost or the broker retains nothing; after every `Connected` the subscriptions are in place; `publish` never waits
for the network; `poll` never waits longer than its timeout; `publish` refuses a payload above the limit.
Stronger guarantees are built on top: acks (`outbox`) and pulled chunks (`exchange`).
"""

from dataclasses import dataclass
from typing import Protocol

MAX_PAYLOAD_BYTES = 1024 * 1024
"""The largest payload of a transport; chunks and control messages are well below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The link is up, for the first time or again: publish retained state and everything without an ack.

    Attributes:
        message_bytes: the broker's limit on a message including MQTT's headers, if it announced one.
    """

    message_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The link is down; the transport reconnects by itself."""

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
    """The message that the broker may publish, retained, when this client vanishes."""

    topic: str
    payload: bytes


class Transport(Protocol):
    """One client's link to a broker. `publish` may be called from any thread, all other methods from one thread."""

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """Connect and subscribe.

        Raises:
            TransportError: the broker cannot be reached or refuses the client; the message says what to do.
        """
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send a message eventually; it may be lost.

        Raises:
            TooLargeError: the payload is above MAX_PAYLOAD_BYTES.
        """
        ...

    def poll(self, timeout_s: float) -> Event | None:
        """Return the next event, or None after `timeout_s` seconds without one."""
        ...

    def close(self) -> None:
        """Disconnect without the will; a second call does nothing."""
        ...
