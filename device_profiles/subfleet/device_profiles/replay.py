"""Reads a resource log at a given time."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from subfleet.device_profiles.logs import LogRow, ResourceLog
from subfleet.protocol.readings import Reading

_ROUNDING_S = 1e-9
"""Times are rounded: what would need less than this after its row does not wait for the next row's rate."""


class ReplayedLog:
    """A log as a function of time.

    Time 0 is the first row. A row is valid until the next one, and the last row for as long as the row before it; then
    the log starts again. The row of a log with one row is always valid.

    Args:
        log: the log, which several devices may share.
        start: the row that takes the place of the first one, counted from 0.
    """

    __slots__ = ("_start_s", "_times_s", "log", "period_s")

    def __init__(self, log: ResourceLog, start: int = 0) -> None:
        self.log = log
        first_s = log.rows[0].t_s
        self._times_s = array("d", (row.t_s - first_s for row in log.rows))
        self._start_s = self._times_s[start]
        last_step_s = self._times_s[-1] - self._times_s[-2] if len(self._times_s) > 1 else 0.0
        self.period_s = self._times_s[-1] + last_step_s

    def started_at(self, start: int) -> "ReplayedLog":
        """The same log with another first row; both share its times."""
        other: ReplayedLog = ReplayedLog.__new__(ReplayedLog)
        other.log, other.period_s, other._times_s = self.log, self.period_s, self._times_s
        other._start_s = self._times_s[start]
        return other

    def read(self, log_time_s: float) -> Reading:
        """Read the log at a time of 0 or more; times beyond the period wrap around.

        Raises:
            ValueError: the time is below 0.
        """
        return self.read_until(log_time_s)[0]

    def read_until(self, log_time_s: float) -> tuple[Reading, float]:
        """Read the log at a time as `read`, and until when the reading holds: the time of the next row.

        Raises:
            ValueError: the time is below 0.
        """
        if not log_time_s >= 0:
            raise ValueError(f"log_time_s is {log_time_s}, but must be 0 or more")
        if not self.period_s:
            return self.log.rows[0].reading, math.inf
        at_s = (self._start_s + log_time_s) % self.period_s
        index = bisect_right(self._times_s, at_s)
        end_s = (*self._times_s[index : index + 1], self.period_s)[0]
        return self.log.rows[index - 1].reading, log_time_s + (end_s - at_s)

    def measure_duration(self, amount: float, rate: Callable[[Reading], float], start_s: float) -> float:
        """Compute the seconds in which a rate that follows the log adds up to an amount.

        Args:
            amount: such as bits; 0 or more.
            rate: the rate per second at a reading; 0 or more, or infinite.
            start_s: the time of the log from which on it counts.

        Returns:
            The seconds; infinite if the rate is 0 everywhere.
        """
        if amount <= 0:
            return 0.0
        at_s = (self._start_s + start_s) % self.period_s if self.period_s else 0.0
        index, elapsed_s, left_at_start = bisect_right(self._times_s, at_s) - 1, 0.0, amount
        while True:
            now = rate(self.log.rows[index].reading)
            end_s = (*self._times_s[index + 1 : index + 2], self.period_s)[0] if self.period_s else math.inf
            if now > 0 and amount <= now * (end_s - at_s + _ROUNDING_S):
                return elapsed_s + amount / now
            if math.isinf(end_s):
                return math.inf
            amount, elapsed_s, at_s, index = amount - now * (end_s - at_s), elapsed_s + end_s - at_s, end_s, index + 1
            if index == len(self._times_s):
                at_s, index = 0.0, 0
                if amount == left_at_start and elapsed_s > self.period_s:
                    return math.inf
                left_at_start = amount

    def low(self, quantile: float) -> Reading:
        """Compute low quantiles of free memory and link rates over the time that the device is available.

        Quantiles are independent, so together, memory and links may be lower for a larger fraction of the time. Unknown
        memory counts as 0, and an unknown link as unlimited.

        Args:
            quantile: fraction of the time, at least 0 and below 1; 0 gives the minimum of the log.

        Raises:
            ValueError: the quantile is out of range.
        """
        if not 0 <= quantile < 1:
            raise ValueError(f"quantile is {quantile}, but must be at least 0 and below 1")
        memory_bytes = self._low(lambda reading: reading.memory_free_bytes or 0, quantile)
        down_bps = self._low(lambda reading: _to_rate(reading.downlink_bps), quantile)
        up_bps = self._low(lambda reading: _to_rate(reading.uplink_bps), quantile)
        return Reading(
            memory_free_bytes=int(memory_bytes), downlink_bps=_from_rate(down_bps), uplink_bps=_from_rate(up_bps)
        )

    def _low(self, value: Callable[[Reading], float], quantile: float) -> float:
        """Compute the largest value that the log is below for at most a fraction of its time."""
        ends_s = (*self._times_s[1:], self.period_s)
        held = [
            (value(row.reading), end_s - time_s)
            for row, time_s, end_s in zip(self.log.rows, self._times_s, ends_s, strict=True)
            if row.reading.available
        ]
        left_s = quantile * math.fsum(seconds for _, seconds in held)
        for lowest, seconds in sorted(held):
            left_s -= seconds
            if left_s < 0:
                return lowest
        return max(held)[0] if held else 0.0  # a log with one row has no duration


def _to_rate(rate_bps: float | None) -> float:
    return math.inf if rate_bps is None else rate_bps


def _from_rate(rate_bps: float) -> float | None:
    return None if math.isinf(rate_bps) else rate_bps


def rotate_log(log: ResourceLog, start: int) -> ResourceLog:
    """Rotate a log, so that it begins with the row `start`, counted from 0."""
    if not start:
        return log
    rows = log.rows
    # The gap between the last row and the first is that between the last two.
    length_s = rows[-1].t_s - rows[0].t_s + (rows[-1].t_s - rows[-2].t_s)
    rotated = [*rows[start:], *(LogRow(t_s=row.t_s + length_s, reading=row.reading) for row in rows[:start])]
    return replace(log, rows=tuple(LogRow(t_s=row.t_s - rows[start].t_s, reading=row.reading) for row in rotated))
