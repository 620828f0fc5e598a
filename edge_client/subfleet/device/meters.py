"""Meters: they read a device's resources from the device itself, or from a replayed log."""

import time
from collections.abc import Callable
from typing import Literal, Protocol

from subfleet.device_profiles.replay import ReplayedLog
from subfleet.protocol.readings import Reading

Direction = Literal["down", "up"]


class Meter(Protocol):
    """Reads the resources of a device."""

    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        """Take a reading; returns it with its time in the replayed log, or None for a live reading."""
        ...

    def low(self, quantile: float) -> Reading | None:
        """Return a low quantile of a replayed log; None if nothing is replayed."""
        ...

    def note_transfer(self, direction: Direction, size_bytes: int, now_s: float) -> None:
        """Note a transfer of some bytes of a blob."""
        ...


class ReplayMeter:
    """Reads a log at the announced time; without one, at the last such time, at first 0.

    The time of the log goes on between announcements, as it does on a device: links and work follow it.

    Args:
        log: what to replay.
        clock: seconds, monotonic.
    """

    def __init__(self, log: ReplayedLog, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log
        self._clock = clock
        self._announced_s = 0.0
        self._announced_at_s = clock()

    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        """See `Meter.read`."""
        if log_time_s is not None and max(log_time_s, 0.0) != self._announced_s:
            self._announced_s, self._announced_at_s = max(log_time_s, 0.0), self._clock()
        return self._announced_s, self.log.read(self._announced_s)

    def find_log_time(self, now_s: float) -> float:
        """Find the time of the log at a time of the clock."""
        return self._announced_s + max(now_s - self._announced_at_s, 0.0)

    def low(self, quantile: float) -> Reading | None:
        """See `Meter.low`."""
        return self.log.low(quantile)

    def note_transfer(self, direction: Direction, size_bytes: int, now_s: float) -> None:
        """Nothing to note: a replayed link's rate is the log's."""


class TransferRate:
    """Estimates a link's rate from the sizes and times of what passed; None until it is known.

    Transfers come in bursts. Within one, the bytes after the first arrival, over the time since it, are the rate;
    bursts are averaged, the newer ones counting more.
    """

    GAP_S = 1.0  # a pause this long ends a burst: nobody asked for anything
    LEAST_S = 0.02  # a shorter burst says more about the clock than about the link
    WEIGHT = 0.3  # of the newest burst

    def __init__(self) -> None:
        self._mean_bps: float | None = None
        self._first_s = 0.0
        self._last_s: float | None = None
        self._bytes = 0

    @property
    def bps(self) -> float | None:
        """Bits per second."""
        burst_bps = self._compute_burst_bps()
        if burst_bps is None or self._mean_bps is None:
            return self._mean_bps if burst_bps is None else burst_bps
        return self._mean_bps + self.WEIGHT * (burst_bps - self._mean_bps)

    def note(self, size_bytes: int, now_s: float) -> None:
        """Note a transfer."""
        if self._last_s is None or now_s - self._last_s > self.GAP_S:
            self._mean_bps = self.bps
            self._first_s = now_s
            self._bytes = 0
        else:
            self._bytes += size_bytes
        self._last_s = now_s

    def _compute_burst_bps(self) -> float | None:
        if self._last_s is None or self._last_s - self._first_s < self.LEAST_S:
            return None
        return 8 * self._bytes / (self._last_s - self._first_s)
