"""Every included run can be played; a file gives the same choices with each kind of host."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import mostly_long

from subfleet.emulation.batch.host import run_in_batch
from subfleet.emulation.files import Files, write_files
from subfleet.emulation.gathering import gather_run
from subfleet.emulation.processes import run_processes
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.link.broker import EmbeddedBroker
from subfleet.methods import METHODS
from subfleet.protocol.errors import RunError
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.export]


class SilentObserver:
    def say(self, text: str) -> None:
        pass

    def round_finished(self, record: RoundRecord) -> None:
        pass


def run_batch_host(run: Run, folder: Path, exports: ExportPool) -> dict[str, Any]:
    run_in_batch(run, folder, SilentObserver(), threading.Event(), exports=exports)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
"""Where the server computes; without a GPU the test for it does not exist, instead of being skipped."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", mostly_long(sorted(METHODS), "fedavg", "fedfa", "fedtrans", "oort"))
def test_a_round_of_every_method_that_we_ship(name: str, device: str, exports: ExportPool, tmp_path: Path) -> None:
    run = read_run(name, ("rounds=1", "training.epochs=1", "deploy_targets=[]", f"device={device}"))
    (record,) = run_batch_host(run, tmp_path, exports)["rounds"]
    rows = record["clients"]
    assert len(rows) + sum(record["idle"].values()) == len(read_run(name).fleet.devices)
    aggregated = [row for row in rows if row["status"] == "aggregated"]
    assert len(aggregated) == (run.clients_per_round or 5)
    assert all(row["planned_peak_bytes"] <= row["budget_bytes"] for row in aggregated)
    # There are ten classes; after one round the random paths of a supernet are untrained.
    assert record["accuracy"] > (0.1 if name != "fedoras" else 0)


SHORT = ("rounds=2", "deploy_targets=[]")


@pytest.mark.long  # a smaller test is in `test_hosts`
@pytest.mark.broker
@pytest.mark.timeout(400)
def test_the_same_file_gives_the_same_choices_and_bits_in_one_process_in_many_and_with_a_testbed(
    cache: CacheFolder, exports: ExportPool, tmp_path: Path
) -> None:
    run, folders = read_run("quickstart", SHORT), {host: tmp_path / host for host in ("batch", "processes")}
    run_batch_host(run, folders["batch"], exports)
    with ExportPool(cache) as pool:
        run_processes(run, folders["processes"], SilentObserver(), threading.Event(), exports=pool)
    # The devices of the testbed have the same samples and replay the same logs.
    folders["serve"] = serve(run, write_files(gather_run(run), tmp_path / "testbed"), cache, tmp_path)
    choices = {host: _read_choices(folder) for host, folder in folders.items()}
    assert choices["batch"] == choices["processes"] == choices["serve"]
    models = {host: (folder / "model.safetensors").read_bytes() for host, folder in folders.items()}
    assert models["batch"] == models["processes"] == models["serve"]


def serve(run: Run, files: Files, cache: CacheFolder, folder: Path) -> Path:
    """Serve the file as to real devices: a process for the server and for each agent, started by the commands."""
    variables = {**os.environ, "SUBFLEET_CACHE": str(cache.path), "OMP_NUM_THREADS": "1"}
    overrides = [part for text in SHORT for part in ("--set", text)]
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        server = [
            "serve",
            "quickstart",
            *overrides,
            "--broker",
            broker.url,
            "--runs",
            str(folder / "served"),
            "--http-port",
            "0",
        ]
        commands = [["subfleet.cli.main", *server]]
        for device in run.fleet.expand_devices():
            arguments = ["--data", str(files.clients[device.id]), "--profile", device.profile, "--replay", device.log]
            arguments += [
                "--runtime",
                device.runtime,
                "--state",
                str(folder / "devices" / device.id),
                "--leave-when-finished",
            ]
            commands.append(["subfleet.edge_client.cli", "join", broker.url, "--id", device.id, *arguments])
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT, env=variables
                )
            )
            for number, command in enumerate(commands)
            for output in [stack.enter_context((folder / f"{number}.txt").open("wb"))]
        ]
        for process in started:
            stack.callback(process.kill)
        ends = time.monotonic() + 300.0
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(ends - time.monotonic(), 0.0))
        codes = [process.poll() for process in started]
    texts = [(folder / f"{number}.txt").read_text(encoding="utf-8") for number in range(len(started))]
    assert codes == [0] * len(codes), "\n\n".join(texts)
    return folder / "served" / run.name


def _read_choices(folder: Path) -> list[list[tuple[Any, ...]]]:
    names = ("client_id", "architecture_id", "budget_bytes", "planned_peak_bytes", "limit", "status", "weight")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["rounds"]]


def test_a_stopped_batch_raises_an_error(exports: ExportPool, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run = replace(read_run("quickstart"), rounds=1)
    with pytest.raises(RunError, match="was stopped before its end"):
        run_in_batch(run, tmp_path, SilentObserver(), stop, exports=exports)
