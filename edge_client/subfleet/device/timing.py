"""How long the work of an emulated device takes, from its resource log and the pace of its profile."""

import math
from dataclasses import dataclass
from typing import Protocol

from subfleet.device.meters import Direction
from subfleet.device_profiles import ReplayedLog
from subfleet.protocol.exhaustive import never
from subfleet.protocol.readings import LEAST_LINK_BPS, Reading
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train
from subfleet.protocol.training import TRAINING_MACS_PER_FORWARD

_BITS = 8
_LEAST_IDLE = 0.01
"""The fraction of a processor that a training gets at least."""


class Timing(Protocol):
    """The seconds that a device needs. Times are those of its log."""

    def transfer_s(self, direction: Direction, size_bytes: int, log_time_s: float) -> float:
        """Seconds of a transfer that begins at a time; infinite if the device never has a link again."""
        ...

    def work_s(self, task: Task, log_time_s: float) -> float:
        """Seconds of a task's work that begins at a time; infinite if the device is never available again."""
        ...


class NoTime:
    """Everything takes no time; see `Timing`."""

    def transfer_s(self, direction: Direction, size_bytes: int, log_time_s: float) -> float:
        """See `Timing.transfer_s`."""
        return 0.0

    def work_s(self, task: Task, log_time_s: float) -> float:
        """See `Timing.work_s`."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTiming:
    """Transfers take what the log's link needs for them, moment by moment, and steps what the profile's pace says.

    A link or a pace that is unknown takes no time. While the log says that the device is not available, nothing moves.

    Attributes:
        log: of the device.
        macs_per_s: multiply-accumulates per second in training; None is unknown.
        sample_count: of its training data.
        held_out_count: of its held-out data.
    """

    log: ReplayedLog
    macs_per_s: float | None
    sample_count: int
    held_out_count: int

    def transfer_s(self, direction: Direction, size_bytes: int, log_time_s: float) -> float:
        """See `Timing.transfer_s`. The link's latency is added once."""

        def rate_bps(reading: Reading) -> float:
            known_bps = reading.downlink_bps if direction == "down" else reading.uplink_bps
            if not reading.available:
                return 0.0
            return math.inf if known_bps is None else max(known_bps, LEAST_LINK_BPS)

        latency_s = self.log.read(log_time_s).latency_s or 0.0
        return latency_s + self.log.measure_duration(_BITS * size_bytes, rate_bps, log_time_s + latency_s)

    def work_s(self, task: Task, log_time_s: float) -> float:
        """See `Timing.work_s`. What other programs use of the processor is missing."""
        pace = self.macs_per_s
        if pace is None:
            return 0.0

        def macs_per_s(reading: Reading) -> float:
            idle = max(1.0 - min(reading.cpu_load or 0.0, 1.0), _LEAST_IDLE)
            return idle * pace if reading.available else 0.0

        passes = self._count_passes(task)
        macs = sum(passes * submodel.forward_macs for submodel in task.submodels)
        return self.log.measure_duration(macs, macs_per_s, log_time_s)

    def _count_passes(self, task: Task) -> int:
        """Forward passes of one sample that take as long as the work with each of a task's submodels."""
        match task.work:
            case Train(settings=settings):
                passes = TRAINING_MACS_PER_FORWARD * settings.sample_passes(self.sample_count)
            case Calibrate():
                passes = TRAINING_MACS_PER_FORWARD * self.sample_count
            case Score(settings=settings, batches=batches):
                passes = TRAINING_MACS_PER_FORWARD * batches * settings.batch_size
            case Evaluate():
                passes = self.held_out_count
            case Deploy():
                passes = 0
            case _:
                never(task.work)
        return passes
