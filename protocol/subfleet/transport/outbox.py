"""Keeps messages and sends them again until the other side acknowledges them."""

from dataclasses import dataclass

_LONGEST_RETRY_FACTOR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message for `Transport.publish`."""

    topic: str
    payload: bytes
    retain: bool = False


@dataclass(slots=True, kw_only=True)
class _Pending:
    outgoing: Outgoing
    due_s: float | None = None  # None: not sent yet
    wait_s: float


class Outbox:
    """Pure: it reads no clock and sends nothing itself. Times are seconds of the caller's monotonic clock.

    Args:
        retry_s: how long to wait for an ack before the first repetition; each further wait is twice as long, up to
            eight times this, so that a peer that is slow is not buried.

    Raises:
        ValueError: retry_s is not above 0.
    """

    def __init__(self, retry_s: float = 2.0) -> None:
        if retry_s <= 0:
            raise ValueError(f"retry_s is {retry_s}, but must be above 0")
        self._retry_s = retry_s
        self._pending: dict[str, _Pending] = {}

    @property
    def pending(self) -> int:
        """Number of messages without an ack."""
        return len(self._pending)

    def put(self, message_id: str, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Keep a message until it is settled; it replaces an older one of the same id."""
        outgoing = Outgoing(topic=topic, payload=payload, retain=retain)
        self._pending[message_id] = _Pending(outgoing=outgoing, wait_s=self._retry_s)

    def list_due(self, now_s: float) -> tuple[Outgoing, ...]:
        """List the messages to send now: new ones, and those that have waited long enough; oldest first."""
        ready = [entry for entry in self._pending.values() if entry.due_s is None or entry.due_s <= now_s]
        for entry in ready:
            entry.due_s = now_s + entry.wait_s
            entry.wait_s = min(2 * entry.wait_s, _LONGEST_RETRY_FACTOR * self._retry_s)
        return tuple(entry.outgoing for entry in ready)

    def settle(self, message_id: str) -> bool:
        """Forget an acknowledged message; False if it was not pending (acks may arrive twice)."""
        return self._pending.pop(message_id, None) is not None

    def resend_all(self) -> None:
        """Make all messages due at once: the link was lost, and perhaps every message with it."""
        for entry in self._pending.values():
            entry.due_s = None
            entry.wait_s = self._retry_s
