"""A transport that waits for a broker that is not reachable yet."""

import logging
import time
from collections.abc import Callable

from subfleet.protocol.errors import UnreachableError
from subfleet.transport.base import Event, Transport, Will

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_SLICE_S = 0.2  # the longest delay of a stop


class WaitingTransport:
    """Opens another transport again and again, with growing pauses, until its broker can be reached.

    It does not wait for a broker that refuses the client or cannot be trusted, as only a correction helps.

    Args:
        inner: the transport that carries the messages.
        stopped: called during the pauses; `open` returns without a link if it returns True.
        sleep: sleeps for a number of seconds.
    """

    def __init__(
        self, inner: Transport, stopped: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._stopped = stopped
        self._sleep = sleep

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        pause_s, logged = _FIRST_PAUSE_S, ""
        while not self._stopped():
            try:
                self._inner.open(subscriptions, will)
            except UnreachableError as error:
                if str(error) != logged:
                    _LOG.warning("%s; waiting for it until Ctrl-C", error)
                logged = str(error)
            else:
                return
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`."""
        self._inner.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        return self._inner.poll(timeout_s)

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _pause(self, pause_s: float) -> None:
        left_s = pause_s
        while left_s > 0 and not self._stopped():
            self._sleep(min(left_s, _SLICE_S))
            left_s -= _SLICE_S
