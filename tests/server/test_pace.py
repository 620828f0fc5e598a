"""Progress of a run and its remaining time, by a clock that stands still unless it is set."""

from dataclasses import replace
from types import MappingProxyType

from subfleet.journal.guarding import GuardedObserver, Unobserved
from subfleet.journal.records import Progress, RoundRecord
from subfleet.rounds.progress import Measuring, Training
from subfleet.rounds.state import ClientState, RunState, Stage
from subfleet.serving.narration import Pace


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def state(number: int, *stages: Stage) -> RunState:
    clients = {
        str(index): ClientState(client_id=str(index), device="d", stage=stage) for index, stage in enumerate(stages)
    }
    return RunState(round=number, at=Training(), clients=MappingProxyType(clients))


def test_rounds_devices_and_time_left() -> None:
    clock = Clock()
    pace = Pace(4, clock)
    assert pace.progress(RunState()) is None
    begun = pace.progress(state(1, "preparing", "out", "skipped", "missing"))
    assert begun == Progress(round=1, round_count=4, answered=0, devices=2, left_s=None)
    assert pace.progress(state(1, "out", "out", "skipped", "missing")) is None, "nothing that is reported has changed"
    clock.now_s += 6
    first = pace.progress(state(1, "done", "out", "skipped", "missing"))
    assert first == replace(begun, answered=1), "no whole round was observed"
    clock.now_s += 4
    assert pace.progress(state(2, "out", "out")) == Progress(
        round=2, round_count=4, answered=0, devices=2, left_s=30.0
    ), "three rounds are left, of 10 s each"
    clock.now_s += 7
    second = pace.progress(state(2, "done", "refused"))
    assert second is not None
    assert (second.answered, second.left_s) == (2, 23.0)
    clock.now_s += 23
    last = pace.progress(state(4, "out"))
    assert last is not None
    assert last.left_s == 40 / 3
    clock.now_s += 1000
    late = pace.progress(state(4, "done"))
    assert late is not None
    assert late.left_s == 0.0


def test_a_resumed_round_is_not_used_to_estimate_durations() -> None:
    clock = Clock()
    pace = Pace(5, clock)
    for number, seconds in ((3, 5), (4, 60)):
        progress = pace.progress(state(number, "out"))
        assert progress is not None
        assert progress.left_s is None
        clock.now_s += seconds
        pace.progress(RunState(round=number + 1, at=Measuring()))
    last = pace.progress(state(5, "out"))
    assert last is not None
    assert last.left_s == 60.0


class FailingObserver(Unobserved):
    def __init__(self) -> None:
        self.heard: list[Progress] = []

    def progressed(self, progress: Progress) -> None:
        self.heard.append(progress)
        raise ZeroDivisionError


class OldObserver:
    def say(self, text: str) -> None:
        """An observer from before progress was reported."""

    def round_finished(self, record: RoundRecord) -> None:
        """Do nothing."""


def test_progress_goes_to_observers_that_take_it_and_their_errors_are_ignored() -> None:
    progress, failing = Progress(round=1, round_count=2, answered=0, devices=1, left_s=None), FailingObserver()
    for observer in (failing, GuardedObserver(failing), OldObserver(), Unobserved()):
        GuardedObserver(observer).progressed(progress)
    assert failing.heard == [progress, progress]
