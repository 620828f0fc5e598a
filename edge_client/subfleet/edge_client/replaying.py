"""Makes a device of a replayed log: its link follows the log, and its work takes as long as its profile's pace says."""

import time
from collections.abc import Callable
from dataclasses import replace

from subfleet.agent.outcomes import WorkFailed
from subfleet.device.meters import ReplayMeter
from subfleet.device.timing import ReplayedTiming
from subfleet.edge_client.task_work import Outcome, TaskWorker, TrainingOutput
from subfleet.protocol.readings import LEAST_LINK_BPS
from subfleet.protocol.task import Task
from subfleet.transport.pacing import LinkConditions


def follow_link(meter: ReplayMeter) -> Callable[[float], LinkConditions]:
    """Return what the link of a replayed log does at a time of the clock."""

    def find_conditions(now_s: float) -> LinkConditions:
        log_time_s = meter.find_log_time(now_s)
        reading, until_s = meter.log.read_until(log_time_s)
        return LinkConditions(
            downlink_bps=_limit_rate(reading.downlink_bps),
            uplink_bps=_limit_rate(reading.uplink_bps),
            latency_s=reading.latency_s or 0.0,
            until_s=now_s + (until_s - log_time_s),
        )

    return find_conditions


def _limit_rate(rate_bps: float | None) -> float | None:
    return None if rate_bps is None else max(rate_bps, LEAST_LINK_BPS)


class PacedWorker:
    """Holds back the outcome of a task until the emulated device would have it. Nothing waits: `outcome` is asked.

    A failure is reported at once, as is everything that is to stop.

    Args:
        inner: does the tasks, as fast as this machine can.
        timing: how long the device needs.
        meter: tells the time of the device's log.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        inner: TaskWorker,
        timing: ReplayedTiming,
        meter: ReplayMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._timing = timing
        self._meter = meter
        self._clock = clock
        self._started_s = 0.0
        self._due_s = 0.0
        self._held: Outcome | None = None

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        """See `TaskWorker.start`."""
        self._started_s = self._clock()
        self._due_s = self._started_s + self._timing.work_s(task, self._meter.find_log_time(self._started_s))
        self._inner.start(task, memory_limit_bytes, data_bytes)

    def stop(self) -> None:
        """See `TaskWorker.stop`."""
        self._due_s = self._started_s
        self._inner.stop()

    def join(self, timeout_s: float) -> None:
        """See `TaskWorker.join`. What is held back is not waited for."""
        self._inner.join(timeout_s)

    def outcome(self) -> Outcome | None:
        """See `TaskWorker.outcome`."""
        if self._held is None:
            self._held = self._inner.outcome()
        held, now_s = self._held, self._clock()
        if held is None or (now_s < self._due_s and not isinstance(held, WorkFailed)):
            return None
        self._held = None
        if isinstance(held, TrainingOutput) and self._due_s > self._started_s:
            # What this machine took means nothing.
            held = replace(held, result=replace(held.result, train_seconds=now_s - self._started_s))
        return held
