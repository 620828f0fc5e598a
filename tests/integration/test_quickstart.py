"""The quickstart as users run it: processes, data, and the embedded broker or Mosquitto."""

import csv
import fcntl
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.demo_story import check_story
from safetensors.torch import load_file
from transport.mosquitto import MOSQUITTO, open_mosquitto

from subfleet.aggregation.checkpoint import checkpoint_path
from subfleet.device_profiles import read_log
from subfleet.export.cache import CacheFolder
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.export, pytest.mark.timeout(600)]

KILLED_ROUNDS = 3
CLIENT_FIELDS = {
    "device",
    "limit",
    "runtime",
    "architecture",
    "budget_bytes",
    "planned_peak_bytes",
    "measured_peak_bytes",
    "bytes_down",
    "bytes_up",
    "seconds",
}


def command_and_environment(folder: Path, cache: CacheFolder) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-u", "-m", "subfleet.cli.main", "run", "quickstart", "--runs", str(folder)]
    return command, {**os.environ, "SUBFLEET_CACHE": str(cache.path)}


def quickstart(folder: Path, cache: CacheFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = command_and_environment(folder, cache)
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=500, check=False, env=environment
    )


@contextmanager
def open_broker() -> Iterator[list[str]]:
    """The options for a run on Mosquitto; none if it is not installed."""
    if MOSQUITTO is None:
        yield []
        return
    with open_mosquitto() as url:
        yield ["--broker", url]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: CacheFolder) -> tuple[Path, str]:
    """The folder and the output of a whole run, on Mosquitto if it is installed.

    The workers of pytest-xdist share the run.
    """
    base = tmp_path_factory.getbasetemp()
    runs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole-run"
    runs.mkdir(exist_ok=True)
    output_file = runs / "printed.txt"
    with (runs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output_file.exists():
            with open_broker() as options:
                process = quickstart(runs, cache, *options)
            assert process.returncode == 0, process.stderr
            output_file.write_text("\n".join([*options, process.stdout]), encoding="utf-8")
    return runs / "quickstart", output_file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def summary(finished: tuple[Path, str]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((finished[0] / "summary.json").read_text(encoding="utf-8"))
    return loaded


def test_the_fleet_is_unequal_in_every_round_and_learns(summary: dict[str, Any]) -> None:
    check_story(summary)
    assert all(set(row) >= CLIENT_FIELDS for record in summary["rounds"] for row in record["clients"])


def test_memory_is_measured_and_not_the_plan(summary: dict[str, Any]) -> None:
    rows = [row for record in summary["rounds"] for row in record["clients"] if row["status"] == "aggregated"]
    assert all(0 < row["measured_peak_bytes"] <= row["budget_bytes"] for row in rows)
    assert all(row["measured_peak_bytes"] != row["planned_peak_bytes"] for row in rows)
    assert {row["runtime"] for row in rows} == {"onnx", "executorch"}


def test_each_device_has_its_own_model(finished: tuple[Path, str], summary: dict[str, Any]) -> None:
    assert len(summary["models"]) == 10, "a .onnx and a .pte for each of five devices"
    for model in summary["models"]:
        assert model["accuracy"] >= 0.80, model
        assert model["max_abs_diff"] <= 1e-4
        path = finished[0] / model["file"]
        assert path.stat().st_size == model["bytes"]


def test_the_summary_has_the_accuracy_of_each_device(finished: tuple[Path, str], summary: dict[str, Any]) -> None:
    """Client processes evaluated their submodels on held-out samples, over a broker."""
    folder, printed = finished
    evaluation = summary["evaluation"]
    values = {row["client_id"]: row["accuracy"] for row in evaluation["clients"]}
    assert {row["status"] for row in evaluation["clients"]} == {"evaluated"}
    assert (evaluation["round"], evaluation["accuracy"]["clients"], len(values)) == (5, 5, 5)
    assert evaluation["accuracy"]["mean"] == pytest.approx(sum(values.values()) / 5)
    assert evaluation["accuracy"]["worst"] == min(values.values()) == values[evaluation["accuracy"]["worst_client"]]
    lower, _, upper = statistics.quantiles(values.values(), n=4, method="inclusive")
    assert evaluation["accuracy"]["interquartile_range"] == pytest.approx(upper - lower)
    assert evaluation["accuracy"]["worst_tier_mean"] == min(evaluation["accuracy"]["tiers"].values())
    assert len(evaluation["accuracy"]["tiers"]) == 5
    assert "the mean accuracy on held-out samples of their own is" in printed
    assert "Evaluation by devices" in (folder / "report.html").read_text(encoding="utf-8")
    with (folder / "evaluations.csv").open(encoding="utf-8", newline="") as file:
        csv_values = {row["client_id"]: float(row["accuracy"]) for row in csv.DictReader(file)}
    assert csv_values == values


def test_the_folder_is_complete(finished: tuple[Path, str], summary: dict[str, Any]) -> None:
    folder, printed = finished
    assert (folder / "report.html").read_text(encoding="utf-8").count("<svg") == 4
    assert set(load_file(folder / "model.safetensors"))
    clients = {row["client_id"] for row in summary["rounds"][0]["clients"]}
    for client in clients:
        assert read_log(folder / "logs" / f"{client}.csv").rows
    with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 25
    assert {"memory", "link"} <= {row["limit"] for row in rows}
    with (folder / "rounds.csv").open(encoding="utf-8", newline="") as file:
        round_rows = list(csv.DictReader(file))
    assert [row["round"] for row in round_rows] == ["1", "2", "3", "4", "5"]
    assert any("1 memory" in row["limits"] for row in round_rows)
    assert "subfleet-edge join" in printed, "the next step is printed"
    assert printed.count("budget MB=") == 25, "one line per device and round if the output is not a terminal"
    assert printed.count("limit=memory ") >= 1
    assert printed.count("limit=link ") >= 1
    assert "<td>memory</td>" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_have_the_same_properties_with_an_empty_cache(seed: int, tmp_path: Path) -> None:
    process = quickstart(tmp_path, CacheFolder(path=tmp_path / "cache"), "--set", f"seed={seed}")
    assert process.returncode == 0, process.stderr
    check_story(json.loads((tmp_path / "quickstart" / "summary.json").read_text(encoding="utf-8")))


def kill_descendant(process_id: int, word: str) -> int:
    """Kill the only descendant process with the word on its command line."""
    (match,) = [process for process in psutil.Process(process_id).children(recursive=True) if word in process.cmdline()]
    match.kill()
    return int(match.pid)


@pytest.fixture(scope="module")
def killed(cache: CacheFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on the embedded broker with a killed client, broker and server, which is then resumed.

    With three rounds, one for each of them, and without deployment, which takes as long as these.
    """
    runs = tmp_path_factory.mktemp("killed")
    command, environment = command_and_environment(runs, cache)
    shorter = ("--set", f"rounds={KILLED_ROUNDS}", "--set", "deploy_targets=[]")
    command += shorter
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        process_ids = []
        for line in run.stdout:
            if line.startswith("round 1 of "):
                process_ids.append(kill_descendant(run.pid, "pi-4"))
            if line.startswith("round 2 of "):
                process_ids.append(kill_descendant(run.pid, "subfleet.link.broker"))
            if line.startswith("round 3 of "):
                run.kill()
                break
    assert len(process_ids) == 2
    assert not (runs / "quickstart" / "summary.json").exists()
    process = quickstart(runs, cache, "--name", "quickstart", *shorter)
    assert process.returncode == 0, process.stderr
    assert "round 2:" not in process.stdout, "an aggregated round is not repeated"
    return runs / "quickstart"


def test_kills_of_client_broker_and_server_cost_time_and_change_no_bit(
    finished: tuple[Path, str], killed: Path
) -> None:
    """The journal has a digest of the whole model after each round."""
    whole = finished[0]
    digests = [_read_digest(killed, number) for number in range(1, KILLED_ROUNDS + 1)]
    assert None not in digests
    assert digests == [_read_digest(whole, number) for number in range(1, KILLED_ROUNDS + 1)]
    written = load_file(killed / "model.safetensors")
    stored = load_file(checkpoint_path(killed / "server" / "checkpoints", KILLED_ROUNDS))
    assert set(written) == set(stored)
    assert all(written[name].numpy().tobytes() == stored[name].numpy().tobytes() for name in stored)
    assert _read_choices(killed) == _read_choices(whole)[:KILLED_ROUNDS]


def _read_digest(folder: Path, round_number: int) -> str | None:
    run_id = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["run_id"]
    return Journal(open_database(folder / "server"), run_id).checkpoint_sha256(round_number)


def _read_choices(folder: Path) -> list[list[tuple[Any, ...]]]:
    names = ("client_id", "architecture_id", "budget_bytes", "planned_peak_bytes", "limit", "status", "weight")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["rounds"]]


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed; run: apt-get install mosquitto")
def test_the_whole_run_uses_mosquitto(finished: tuple[Path, str]) -> None:
    """The test above compares the bits with those of a run on the embedded broker."""
    option, url, *_ = finished[1].splitlines()
    assert option == "--broker"
    assert f"Broker at {url.removeprefix('mqtt://')};" in finished[1]
