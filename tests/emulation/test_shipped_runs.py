"""Every run that we ship is run, and the same file gives the same choices wherever its devices are."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subfleet.emulation.batch.exports import AwaitedExports
from subfleet.emulation.batch.host import run_in_batch
from subfleet.emulation.processes import run_processes
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.methods import METHODS
from subfleet.protocol.errors import RunError
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.export]


class Silent:
    def say(self, text: str) -> None:
        pass

    def round_finished(self, record: RoundRecord) -> None:
        pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CacheFolder:
    return CacheFolder(path=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def exports(cache: CacheFolder) -> Iterator[AwaitedExports]:
    with AwaitedExports(cache) as settled:
        yield settled


def batch(run: Run, folder: Path, exports: AwaitedExports) -> dict[str, Any]:
    run_in_batch(run, folder, Silent(), threading.Event(), exports=exports)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_round_of_every_method_that_we_ship(name: str, exports: AwaitedExports, tmp_path: Path) -> None:
    (record,) = batch(read_run(name, ("rounds=1", "training.epochs=1", "deploy_targets=[]")), tmp_path, exports)[
        "rounds"
    ]
    rows = record["clients"]
    assert {row["client_id"] for row in rows} == {device.id for device in read_run(name).fleet.devices}
    folded = [row for row in rows if row["status"] == "folded"]
    assert len(folded) == 5
    assert all(row["planned_peak_bytes"] <= row["budget_bytes"] for row in folded)
    assert record["accuracy"] > 0.1, "of ten classes"


@pytest.mark.broker
def test_the_same_file_gives_the_same_choices_and_bits_on_processes_and_in_one(
    cache: CacheFolder, exports: AwaitedExports, tmp_path: Path
) -> None:
    run = read_run("quickstart", ("rounds=2", "deploy_targets=[]"))
    one = batch(run, tmp_path / "batch", exports)
    with ExportPool(cache) as pool:
        folder = tmp_path / "processes"
        run_processes(run, folder, Silent(), threading.Event(), exports=pool)
    other = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert [_choices(record) for record in one["rounds"]] == [_choices(record) for record in other["rounds"]]
    models = [(tmp_path / host / "model.safetensors").read_bytes() for host in ("batch", "processes")]
    assert models[0] == models[1]


def _choices(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    names = ("client_id", "spec_id", "budget_bytes", "planned_peak_bytes", "limit", "status", "weight")
    return [tuple(row[name] for name in names) for row in record["clients"]]


def test_a_batch_that_is_stopped_says_so(exports: AwaitedExports, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run = replace(read_run("quickstart"), rounds=1)
    with pytest.raises(RunError, match="was stopped before its end"):
        run_in_batch(run, tmp_path, Silent(), stop, exports=exports)
