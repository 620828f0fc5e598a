"""A rate limit for each device: messages beyond it are dropped unread, so that no device can overload the server."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import BlobMissing, ChunkRequest, text_bytes
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Delivery, Event, Transport, Will

_OF_TRANSFERS = frozenset({ChunkRequest.KIND, BlobMissing.KIND})
"""A transfer needs hundreds of these short messages per second: only their length counts."""
_UNIT_BYTES = 4 * 1024
"""A message costs one unit, and one more for each of these many bytes: long ones take longer to read."""
_MOST_ACCOUNTS = 2**16
_SWEEP_S = 60.0
"""How often full allowances are removed, if there is no room for another."""
_MOST_DROPPED = 1024
"""Messages to drop in one poll: the server's other work must not wait for them."""


@dataclass(slots=True)
class _Allowance:
    units: float
    at_s: float


class RatedTransport:
    """A server's transport that drops the messages of a device beyond its rate.

    A working device sends about five messages per heartbeat interval, one unit each. Every device may save up
    `burst_units`, and earns `units_per_s`. Beyond 65,536 devices in the last minute, all others share one allowance.
    Chunks have no rate: unrequested ones are dropped by their header.

    Args:
        inner: the transport that carries the messages.
        topics: of the fleet.
        complain: called with a device's id and a sentence for each message that is dropped.
        units_per_s: above 0.
        burst_units: at least the cost of the longest message, 65.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        inner: Transport,
        topics: Topics,
        complain: Callable[[str, str], None],
        *,
        units_per_s: float = 20.0,
        burst_units: float = 400.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._topics = topics
        self._complain = complain
        self._units_per_s = units_per_s
        self._burst_units = burst_units
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}
        self._swept_s = clock()

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        self._inner.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`; also returns None after many messages were dropped."""
        for _ in range(_MOST_DROPPED):
            event = self._inner.poll(timeout_s)
            if not isinstance(event, Delivery) or self._allows(event):
                return event
            timeout_s = 0.0
        return None

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _allows(self, delivery: Delivery) -> bool:
        try:
            address = self._topics.parse(delivery.topic)
        except ProtocolError:
            return True  # the reader complains about it
        if address.direction != "up" or address.kind == CHUNK:
            return True
        cost = (address.kind not in _OF_TRANSFERS) + text_bytes(delivery.payload) // _UNIT_BYTES
        account = self._find_allowance(address.client_id)
        if account.units < cost:
            self._complain(address.client_id, "sends more than its rate allows, and is ignored for a while")
            return False
        account.units -= cost
        return True

    def _find_allowance(self, client_id: str) -> _Allowance:
        now_s = self._clock()
        if len(self._allowances) >= _MOST_ACCOUNTS and now_s - self._swept_s >= _SWEEP_S:
            self._swept_s, full_s = now_s, self._burst_units / self._units_per_s
            self._allowances = {
                name: allowance for name, allowance in self._allowances.items() if now_s - allowance.at_s < full_s
            }
        name = client_id if client_id in self._allowances or len(self._allowances) < _MOST_ACCOUNTS else ""
        account = self._allowances.setdefault(name, _Allowance(units=self._burst_units, at_s=now_s))
        account.units = min(self._burst_units, account.units + self._units_per_s * (now_s - account.at_s))
        account.at_s = now_s
        return account
