"""Reads a resource log at a given time, as if the device were there."""

from bisect import bisect_right

from subfleet.device_profiles.logs import ResourceLog
from subfleet.protocol.readings import Reading

__all__ = ["ReplayedLog"]


class ReplayedLog:
    """A log as a function of time.

    Time 0 is the first row. Between rows the earlier one holds. After the last row, which holds as long as the row
    before it did, the log starts again; a log of one row holds for ever.
    """

    def __init__(self, log: ResourceLog) -> None:
        self.log = log
        first_s = log.rows[0].t_s
        self._times_s = [row.t_s - first_s for row in log.rows]
        last_step_s = self._times_s[-1] - self._times_s[-2] if len(self._times_s) > 1 else 0.0
        self.period_s = self._times_s[-1] + last_step_s

    def read(self, log_time_s: float) -> Reading:
        """The reading at a time of 0 or more; times beyond the period wrap around.

        Raises:
            ValueError: the time is below 0.
        """
        if not log_time_s >= 0:
            raise ValueError(f"log_time_s is {log_time_s}, but must be 0 or more")
        at_s = log_time_s % self.period_s if self.period_s else 0.0
        return self.log.rows[bisect_right(self._times_s, at_s) - 1].reading
