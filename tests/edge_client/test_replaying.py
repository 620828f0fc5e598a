"""A device of a replayed log: what its link does at each moment, and how long its work takes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import train_task, with_work
from transport.sides import ManualClock

from subfleet.agent.outcomes import WorkFailed
from subfleet.device.meters import ReplayMeter
from subfleet.device.timing import ReplayedTiming
from subfleet.device_profiles import LogRow, ReplayedLog, ResourceLog
from subfleet.edge_client.replaying import PacedWorker, follow_link
from subfleet.edge_client.task_work import Outcome, TrainingOutput
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.messages import Task
from subfleet.protocol.readings import LEAST_LINK_BPS, Reading
from subfleet.protocol.training import TrainingSettings
from subfleet.transport.pacing import LinkConditions

RESULT = TrainResult(sample_count=10, step_count=1, loss=0.5, accuracy=1.0, train_seconds=0.25, measured_peak_bytes=1)


class FastWorker:
    """A machine that is ready as soon as the test says."""

    def __init__(self) -> None:
        self.ready: Outcome | None = None
        self.started: list[tuple[str, int, int]] = []
        self.stops = 0

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        self.started.append((task.task_id, memory_limit_bytes, data_bytes))

    def stop(self) -> None:
        self.stops += 1

    def join(self, timeout_s: float) -> None:
        """Nothing runs."""

    def outcome(self) -> Outcome | None:
        ready, self.ready = self.ready, None
        return ready


class Rig:
    """A device with 10 samples and a pace of 600 multiplications a second."""

    def __init__(self, *readings: Reading, macs_per_s: float | None = 600.0) -> None:
        rows = tuple(LogRow(t_s=10.0 * number, reading=reading) for number, reading in enumerate(readings))
        log = ReplayedLog(ResourceLog(device="virtual", source="a test", licence="none", rows=rows))
        self.clock, self.inner = ManualClock(), FastWorker()
        self.meter = ReplayMeter(log, self.clock)
        timing = ReplayedTiming(log=log, macs_per_s=macs_per_s, sample_count=10, held_out_count=0)
        self.train_seconds = math.nan
        self.worker = PacedWorker(self.inner, timing, self.meter, self.clock)

    def start(self) -> None:
        """Start a training of two epochs: 3 * 2 * 10 * 100 multiplications, which take 10 s."""
        settings = TrainingSettings(epochs=2)
        self.worker.start(with_work(train_task("t1", forward_macs=100), settings=settings), 1000, 10)
        assert self.inner.started == [("t1", 1000, 10)]

    def find_end(self, *, most_s: int = 200) -> float:
        """Let time pass in steps of half a second until there is an outcome; returns the time."""
        for half_seconds in range(2 * most_s):
            self.clock.now_s = 0.5 * half_seconds
            outcome = self.worker.outcome()
            if outcome is not None:
                assert isinstance(outcome, TrainingOutput)
                assert outcome.result == replace(RESULT, train_seconds=outcome.result.train_seconds)
                self.train_seconds = outcome.result.train_seconds
                return self.clock.now_s
        return math.inf


OUTPUT = TrainingOutput(task_id="t1", result=RESULT, output_path=Path("output"))


def test_a_training_takes_as_long_as_the_device_needs() -> None:
    rig = Rig(Reading())
    rig.start()
    rig.inner.ready = OUTPUT
    assert rig.find_end() == 10.0
    assert rig.train_seconds == 10.0, "and not what this machine took"
    assert rig.worker.outcome() is None


def test_a_slow_machine_is_not_slowed_down_further() -> None:
    rig = Rig(Reading())
    rig.start()
    rig.clock.now_s = 12.0
    assert rig.worker.outcome() is None
    rig.inner.ready = OUTPUT
    outcome = rig.worker.outcome()
    assert isinstance(outcome, TrainingOutput)
    assert outcome.result.train_seconds == 12.0


def test_other_load_and_absence_slow_a_training_down_while_they_last() -> None:
    """From second 5 on, 5 s at full pace, 10 s away, 10 s at a quarter, and the rest at full pace."""
    rig = Rig(Reading(), Reading(available=False), Reading(cpu_load=0.75), Reading())
    rig.meter.read(5.0)
    rig.start()
    rig.inner.ready = OUTPUT
    assert rig.find_end() == 5.0 + 10.0 + 10.0 + 2.5


def test_an_unknown_pace_slows_nothing() -> None:
    rig = Rig(Reading(), macs_per_s=None)
    rig.start()
    rig.inner.ready = OUTPUT
    assert rig.find_end() == 0.0
    assert rig.train_seconds == 0.25


@pytest.mark.parametrize("when", ["before the machine is ready", "while the outcome is held back"])
def test_a_stop_waits_for_nothing(when: str) -> None:
    rig = Rig(Reading())
    rig.start()
    rig.inner.ready = None if when.startswith("before") else OUTPUT
    assert rig.worker.outcome() is None
    rig.worker.stop()
    assert rig.inner.stops == 1
    rig.inner.ready = rig.inner.ready or OUTPUT
    assert rig.worker.outcome() == OUTPUT


def test_a_failure_is_told_at_once() -> None:
    rig = Rig(Reading())
    rig.start()
    rig.inner.ready = WorkFailed(task_id="t1", reason="memory", detail="the worker process was ended by SIGKILL")
    assert isinstance(rig.worker.outcome(), WorkFailed)


def test_a_link_follows_the_log_from_the_announced_time_on() -> None:
    readings = (Reading(downlink_bps=5e6, latency_s=0.25), Reading(uplink_bps=0.0))
    rig = Rig(*readings)
    find = follow_link(rig.meter)
    assert find(0.0) == LinkConditions(downlink_bps=5e6, latency_s=0.25, until_s=10.0)
    assert find(10.0) == LinkConditions(uplink_bps=LEAST_LINK_BPS, until_s=20.0)
    assert find(21.0).downlink_bps == 5e6, "a log begins again at its end"
    rig.clock.now_s = 30.0
    rig.meter.read(18.0)
    assert find(31.0) == LinkConditions(uplink_bps=LEAST_LINK_BPS, until_s=32.0)
    assert Rig(readings[0]).meter.log.read_until(1e9) == (readings[0], math.inf)
