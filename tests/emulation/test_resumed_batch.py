"""A batch that was stopped goes on after its last round, and ends as if it had never stopped."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulation.batch_cases import experiment

from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import RoundRecord
from subfleet.methods.adaptive import FedAdam
from subfleet.methods.oort import Oort
from subfleet.protocol.errors import ConfigError
from subfleet.serving.deployment import StoppedError
from subfleet.settings.sections import AsynchronousSettings, Evaluations

pytestmark = [pytest.mark.slow, pytest.mark.export]


class Stopper(Unobserved):
    """Stops a run after a round."""

    def __init__(self, after: int) -> None:
        self.stop, self.rounds = threading.Event(), list[int]()
        self._after = after

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)
        if record.round == self._after:
            self.stop.set()


def play(exports: ExportPool, state: Path | None, *, after: int = 0, **changes: Any) -> tuple[BatchResult, Stopper]:
    stopper = Stopper(after)
    gathered = experiment(**{"rounds": 3, **changes})
    return run_batch(gathered, exports, observer=stopper, stop=stopper.stop, state=state), stopper


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": FedAdam(), "evaluation": Evaluations(every=1)},
        {"method": Oort(durations="expected")},
    ],
    ids=["heterofl", "a server optimiser and evaluations", "a method that remembers"],
)
def test_a_stopped_run_ends_as_if_it_had_never_stopped(
    exports: ExportPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole, _ = play(exports, None, **changes)
    for after in (1, 2):
        with pytest.raises(StoppedError):
            play(exports, tmp_path / "state", after=after, **changes)
    resumed, stopper = play(exports, tmp_path / "state", **changes)
    assert stopper.rounds == [3]
    assert resumed.model == whole.model
    assert resumed.rounds == whole.rounds
    assert resumed.result.evaluations == whole.result.evaluations
    assert resumed.logical_seconds == whole.logical_seconds


def test_a_finished_run_is_extended(exports: ExportPool, tmp_path: Path) -> None:
    whole, _ = play(exports, None)
    play(exports, tmp_path / "state", rounds=2)
    extended, stopper = play(exports, tmp_path / "state")
    assert stopper.rounds == [3]
    assert extended.model == whole.model
    assert [replace(record, seconds=None) for record in extended.rounds[:2]] == [
        replace(record, seconds=None) for record in whole.rounds[:2]
    ]


def test_devices_of_asynchronous_rounds_are_asked_anew(exports: ExportPool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rounds": 4, "asynchronous": AsynchronousSettings(buffer=1, concurrency=3)}
    with pytest.raises(StoppedError):
        play(exports, tmp_path / "state", after=2, **changes)
    resumed, stopper = play(exports, tmp_path / "state", **changes)
    assert stopper.rounds == [3, 4]
    assert [[row.status for row in record.clients] for record in resumed.rounds] == [["aggregated"]] * 4
    assert [row.staleness for record in resumed.rounds for row in record.clients][2] == 0, "it got the newest model"


def test_other_settings_do_not_continue_a_run(exports: ExportPool, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        play(exports, tmp_path / "state", after=1)
    with pytest.raises(ConfigError, match="seed"):
        play(exports, tmp_path / "state", seed=6)
