"""Real agents and stores in a batch: a certain failure ends the run, and submodels fit the disks of devices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation.batch_cases import LARGE_BYTES, SAMPLES, client, experiment

from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.protocol.errors import FileError, RunError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset

pytestmark = pytest.mark.slow


def fleet(
    changed: Callable[[EmulatedDevice], EmulatedDevice] = lambda device: device, *, healthy: int = 0, **changes: object
) -> GatheredRun:
    """Two devices; the last `healthy` ones are unchanged."""
    clients = [client(name, index, LARGE_BYTES, runtime="torch") for index, name in enumerate(("ada", "bob"))]
    clients = [device if index >= 2 - healthy else changed(device) for index, device in enumerate(clients)]
    base = experiment(**{"rounds": 1, "min_clients": 2, "targets": ("torch",), **changes})  # type: ignore[arg-type]  # settings
    return replace(base, devices=tuple(clients))


def relabel(labels: np.ndarray[Any, Any]) -> Callable[[EmulatedDevice], EmulatedDevice]:
    """A change of the labels of a device."""
    return lambda device: replace(device, data=Dataset(inputs=device.data.inputs, labels=labels))


BEYOND = relabel(np.full(SAMPLES, 12, np.int64))
TARGETS = relabel(np.full(SAMPLES, 0.5, np.float32))


def test_a_learning_rate_at_which_every_training_diverges_ends_the_run(exports: ExportPool) -> None:
    training = TrainingSettings(epochs=2, batch_size=8, learning_rate=1e30)
    with pytest.raises(
        RunError, match=r"in 2 attempts, and further attempts would fail for the same reasons: ada, bob refused"
    ) as caught:
        run_batch(fleet(training=training), exports)
    assert "diverged: the loss was nan in step" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.RUN


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (BEYOND, "ada, bob skipped: its data have 13 classes, but the model has 10"),
        (TARGETS, "ada, bob skipped: its labels are floating point numbers, but the run's labels are classes"),
    ],
)
def test_data_that_are_wrong_on_every_device_end_the_run(
    changed: Callable[[EmulatedDevice], EmulatedDevice], words: str, exports: ExportPool
) -> None:
    with pytest.raises(RunError, match=f"in 2 attempts, and further attempts would fail for the same reasons: {words}"):
        run_batch(fleet(changed), exports)


def test_one_healthy_device_is_enough_for_a_run(exports: ExportPool) -> None:
    result = run_batch(fleet(TARGETS, healthy=1), exports)
    assert [row.status.split(":")[0] for row in result.rounds[0].clients] == ["skipped", "aggregated"]


def test_data_that_no_device_can_read_any_more_end_the_run(
    exports: ExportPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, after a memory card was removed: the reason is the data and not the program."""

    def unreadable(*_: object) -> Dataset:
        raise FileError("data file 'faces.npz' cannot be opened (No such file or directory); check the path")

    monkeypatch.setattr("subfleet.emulation.batch.trainers.fit_to_form", unreadable)
    with pytest.raises(RunError, match=r"in 2 attempts, .*: ada, bob refused: data: data file 'faces\.npz' cannot be"):
        run_batch(fleet(), exports)


def test_a_batch_that_does_not_end_reports_what_it_waits_for(exports: ExportPool) -> None:
    starved = fleet(lambda device: replace(device, profile=replace(device.profile, memory_limit="1K")))
    run = replace(starved.run, host=replace(starved.run.host, turns_per_round=20))
    with pytest.raises(
        RunError, match=r"did not end within 40 turns: .* and waits for ada, bob skipped: no submodel fits"
    ):
        run_batch(replace(starved, run=run), exports)


def test_a_board_trains_in_round_1_the_largest_submodel_that_its_disk_holds(exports: ExportPool) -> None:
    """A run without a disk limit reports the sizes; a lower limit leads to a smaller submodel."""
    unlimited = run_batch(fleet(), exports).rounds[0].clients[0]
    assert (unlimited.limit, unlimited.refusals) == ("", "")

    def limit_disk(device: EmulatedDevice) -> EmulatedDevice:
        return replace(device, profile=replace(device.profile, disk_limit=str(unlimited.disk_bytes)))

    for row in (
        run_batch(fleet(limit_disk, healthy=1, rounds=2), exports).rounds[number].clients[0] for number in (0, 1)
    ):
        assert (row.status, row.limit, row.refusals) == ("aggregated", "disk", "")
        assert 0 < row.disk_bytes <= (row.disk_budget_bytes or 0) < unlimited.disk_bytes
        assert 0 < row.parameters < unlimited.parameters
