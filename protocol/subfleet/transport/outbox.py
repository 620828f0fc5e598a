"""What was sent and has no ack yet: kept, and sent again, until the other side says that it has it."""

from dataclasses import dataclass

__all__ = ["Outbox", "Outgoing"]

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
        """How many messages lack their ack."""
        return len(self._pending)

    def put(self, message_id: str, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Keep a message until it is settled; one of the same id takes the place of the older one."""
        outgoing = Outgoing(topic=topic, payload=payload, retain=retain)
        self._pending[message_id] = _Pending(outgoing=outgoing, wait_s=self._retry_s)

    def due(self, now_s: float) -> tuple[Outgoing, ...]:
        """What is to be sent now: what never was, and what has waited long enough; oldest first."""
        ready = [entry for entry in self._pending.values() if entry.due_s is None or entry.due_s <= now_s]
        for entry in ready:
            entry.due_s = now_s + entry.wait_s
            entry.wait_s = min(2 * entry.wait_s, _LONGEST_RETRY_FACTOR * self._retry_s)
        return tuple(entry.outgoing for entry in ready)

    def settle(self, message_id: str) -> bool:
        """Forget a message, as its ack came; False where it was not pending (acks come twice, too)."""
        return self._pending.pop(message_id, None) is not None

    def resend_all(self) -> None:
        """Make everything due at once: the link was lost, and perhaps every message with it."""
        for entry in self._pending.values():
            entry.due_s = None
            entry.wait_s = self._retry_s
