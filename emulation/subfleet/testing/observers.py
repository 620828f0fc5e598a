"""The contract of observers."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.observers import OBSERVERS, ObserverFactory
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

_AGGREGATED = ClientRow(
    client_id="ada",
    device="laptop",
    runtime="onnx",
    architecture="w1",
    architecture_id="0123456789abcdef",
    parameters=1000,
    memory_free_bytes=10**9,
    budget_bytes=10**8,
    downlink_budget_bytes=10**6,
    uplink_budget_bytes=None,
    update_bytes=4000,
    planned_peak_bytes=10**7,
    measured_peak_bytes=9 * 10**6,
    bytes_down=5000,
    bytes_up=4100,
    seconds=1.5,
    loss=0.7,
    sample_count=100,
    status="aggregated",
    weight=1.0,
    share=1.0,
)
_ABSENT = replace(
    _AGGREGATED, client_id="bob", status="missing: no telemetry came in time", runtime="", weight=0.0, share=0.0
)


class ObserverContract:
    """Tests that every observer passes; pytest runs those of a subclass.

    Attributes:
        observer: the name of a registered observer, or the function itself, as `observer = staticmethod(mine)`.
    """

    observer: str | ObserverFactory

    def test_it_hears_a_run_from_its_begin_to_its_end(self, tmp_path: Path) -> None:
        """It accepts sentences and rounds, also rounds without participants and with infinite or missing figures."""
        odd = replace(_record(2, _ABSENT), accuracy=0.0, loss=nan)
        with self._factory()(self._run(), tmp_path) as observer:
            observer.say("it begins\n[bold]and goes on[/bold] with 50 % and {braces}")
            for record in (_record(1, _AGGREGATED, _ABSENT), odd, replace(_record(3, _AGGREGATED), loss=inf)):
                observer.round_finished(record)

    def test_a_run_that_is_taken_up_is_heard_again(self, tmp_path: Path) -> None:
        """The folder contains its earlier output, and its first round need not be round 1."""
        for number in (1, 2):
            with self._factory()(self._run(), tmp_path) as observer:
                observer.round_finished(_record(number, _AGGREGATED))

    def test_a_run_that_fails_is_not_hidden(self, tmp_path: Path) -> None:
        """An error passes through the context of the observer, also before the first round."""
        error = RuntimeError("the run has failed")
        with pytest.raises(RuntimeError) as raised, self._factory()(self._run(), tmp_path):
            raise error
        assert raised.value is error, "the context raised another error"

    def _factory(self) -> ObserverFactory:
        observer = self.observer
        return OBSERVERS.load(observer) if isinstance(observer, str) else observer

    def _run(self) -> Run:
        return read_run("quickstart")


def _record(number: int, *rows: ClientRow) -> RoundRecord:
    return RoundRecord(round=number, accuracy=0.5, loss=1.0, seconds=2.0, log_time_s=None, clients=rows)
