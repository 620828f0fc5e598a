"""The processes of a run of every method are killed: the run ends with the same bits as an undisturbed one.

`make test` kills the quickstart (see `test_quickstart`), and servers without processes of their own: with every method
in `test_coordinator_random`, and simulated ones such as that of a search in `test_requested_estimates`.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from subfleet.emulation.batch.host import run_in_batch
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.methods import METHODS
from subfleet.settings.reading import read_run
from subfleet.settings.run_folder import read_replay

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.broker, pytest.mark.export, pytest.mark.timeout(600)]

CHOOSING = ("oort", "power_of_choice", "pyramidfl")
"""Methods that select clients; one client is not selected in each round."""
ROUNDS = {"fedoras": 4, "fedtrans": 8}
"""Methods with more than three rounds: a network has to grow or be found, be exported and be assigned."""
FIRST_EVALUATED = {"fedoras": 3}
"""The first round after which devices have a network to evaluate, if it is not round 1."""
SEARCHING = (
    "method = { supernet_rounds = 2, search = { evolution = { evaluations = 8, population = 4, offspring = 4 } } }"
)
GROWING = "method = {gamma = 1, delta = 1, beta = 1e9, stop_rounds = 0}"
FILE = """
base = "{name}"
name = "{name}"
rounds = {rounds}
{more}
min_clients = 3
deploy_targets = []
exports_per_round = 1
communication_s = 0.15
clients_per_round = {count}
evaluation = {{ every = 1 }}
training = {{ epochs = 2 }}
{model}

[[fleet.devices]]
id = "pi-4"
profile = "raspberry_pi_4"
log = "raspberry_pi_4"
{networks[0]}

[[fleet.devices]]
id = "phone"
profile = "android_phone"
log = "android_phone"
{networks[1]}

[[fleet.devices]]
id = "laptop"
profile = "laptop"
log = "laptop"
{networks[2]}
"""
DEVICE_NETWORKS = tuple(
    f'network = {{ family = "mlp", widths = [{width}], depths = [{depth}], group_size = 16 }}'
    for width, depth in ((32, 1), (32, 2), (64, 1))
)
"""The networks of devices for FedADP."""


class Command:
    """A `subfleet` command that may be killed; its child processes then end without a request."""

    def __init__(self, cache: CacheFolder, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "subfleet.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SUBFLEET_CACHE": str(cache.path)},
        )

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        yield from self._process.stdout

    def kill_child(self, *words: str) -> bool:
        """Kill a descendant process with one of the words as an argument; whether there was one."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if set(words) & set(child.cmdline()):
                child.kill()
                return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> tuple[int, str]:
        output, _ = self._process.communicate(timeout=300)
        return self._process.returncode, output


@pytest.mark.parametrize("name", sorted(METHODS))
def test_whatever_is_killed_the_run_ends_with_the_same_choices_and_bits(
    name: str, cache: CacheFolder, tmp_path: Path
) -> None:
    path, calm, generator = tmp_path / "run.toml", tmp_path / "calm", random.Random(name)
    path.write_text(write_run_file(name), encoding="utf-8")
    runs = str(tmp_path / "runs")

    first = Command(cache, "run", str(path), "--runs", runs)
    for line in first.lines():
        if line.startswith("round 1:"):
            assert first.kill_child(generator.choice(["pi-4", "phone", "laptop"]))
            time.sleep(generator.uniform(0.0, 2.0))
            first.kill()
            break
    assert not (tmp_path / "runs" / name / "summary.json").exists(), "the run was killed before its end"

    second = Command(cache, "runs", "resume", name, "--runs", runs)
    for line in second.lines():
        if line.startswith("Broker at"):
            assert second.kill_child("subfleet.link.broker")
            time.sleep(generator.uniform(1.0, 4.0))
            second.kill()
            break
    else:
        pytest.fail(f"it ended before it was killed: {second.wait()}")

    if not (tmp_path / "runs" / name / "summary.json").exists():
        code, output = Command(cache, "runs", "resume", name, "--runs", runs).wait()
        assert code == 0, output
        assert "round 1:" not in output, "an aggregated round is not repeated"
    disturbed = tmp_path / "runs" / name
    settings = read_run(path)
    if (
        not settings.roles.assigner.awaits_programs
    ):  # the rounds in which programs arrive depend on speed, and are read from the run
        settings = read_replay(disturbed)
        assert len(_list_trained(disturbed)) > 1
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(settings, calm, Unobserved(), threading.Event(), exports=exports)
    assert _read_choices(disturbed) == _read_choices(calm)
    assert _read_evaluations(disturbed) == _read_evaluations(calm)
    assert (disturbed / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()


def write_run_file(name: str) -> str:
    more = {"fedtrans": GROWING, "fedoras": SEARCHING}.get(name, "")
    model = "model = { widths = [64], depths = [2] }"
    return FILE.format(
        name=name,
        count=2 if name in CHOOSING else 0,
        rounds=ROUNDS.get(name, 3),
        more=more,
        networks=DEVICE_NETWORKS if name == "fedadp" else ("",) * len(DEVICE_NETWORKS),
        model="model = { depths = [1, 1] }" if name == "fedoras" else model,
    )


def _list_trained(folder: Path) -> set[str]:
    """The ids of the architectures that were trained."""
    return {
        architecture_id for choices in _read_choices(folder) for _, architecture_id, *_ in choices if architecture_id
    }


def _read_choices(folder: Path) -> list[list[tuple[Any, ...]]]:
    names = ("client_id", "architecture_id", "budget_bytes", "planned_peak_bytes", "limit", "status", "weight")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["rounds"]) == ROUNDS.get(summary["method"], 3)
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["rounds"]]


def _read_evaluations(folder: Path) -> list[list[tuple[Any, ...]]]:
    """The evaluations of each device after each round; each round occurs once."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rounds = range(FIRST_EVALUATED.get(summary["method"], 1), ROUNDS.get(summary["method"], 3) + 1)
    assert [record["round"] for record in summary["evaluations"]] == list(rounds)
    names = ("client_id", "architecture_id", "loss", "accuracy", "sample_count", "label_count", "status")
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["evaluations"]]


@pytest.mark.parametrize("scoring", ["server", "devices"])
def test_a_run_that_is_killed_in_its_search_and_in_fine_tuning_ends_with_the_same_networks_and_bits(
    scoring: str, cache: CacheFolder, tmp_path: Path
) -> None:
    """It is killed after each of two generations, and scores no generation twice; then it is killed in fine-tuning."""
    path, calm, runs = tmp_path / "run.toml", tmp_path / "calm", tmp_path / "runs"
    federated = f'search = {{ scoring = "{scoring}", scoring_clients = 2, scoring_rounds = 2, '
    path.write_text(write_run_file("fedoras").replace("search = { ", federated), encoding="utf-8")
    prefix = "search after round 2, generation"
    command, lines = Command(cache, "run", str(path), "--runs", str(runs)), list[str]()
    for killed_at in (prefix, prefix, "round 3:"):
        for line in command.lines():
            lines += [line] if line.startswith(prefix) else []
            if line.startswith(killed_at):
                command.kill()
                break
        else:
            pytest.fail(f"it ended before it was killed: {command.wait()}")
        command = Command(cache, "runs", "resume", "fedoras", "--runs", str(runs))
    code, output = command.wait()
    assert code == 0, output
    assert prefix not in output
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(read_replay(runs / "fedoras"), calm, Unobserved(), threading.Event(), exports=exports)
    disturbed, whole = (json.loads((folder / "summary.json").read_text()) for folder in (runs / "fedoras", calm))
    numbers = [int(line.split("generation ")[1].split(":")[0]) for line in lines]
    assert numbers == sorted(set(numbers))
    # A batch has the seconds of its own clock, and after a kill blobs may be sent twice: these figures differ.
    generations = [
        [
            {**generation, "seconds": 0.0, "devices": generation["devices"] is not None}
            for generation in summary["generations"]
        ]
        for summary in (disturbed, whole)
    ]
    assert generations[0] == generations[1]
    assert len(generations[0]) > 2
    assert all(generation["devices"] == (scoring == "devices") for generation in generations[0])
    assert _read_choices(runs / "fedoras") == _read_choices(calm)
    for name in ("model.safetensors", "supernet.safetensors"):
        assert (runs / "fedoras" / name).read_bytes() == (calm / name).read_bytes()


@pytest.mark.parametrize("host", ["batch", "processes"])
def test_a_killed_sweep_goes_on_with_the_run_that_was_not_over(host: str, cache: CacheFolder, tmp_path: Path) -> None:
    """A batch starts the run again, as it saves no state; with client processes the run is resumed."""
    path, runs = tmp_path / "run.toml", tmp_path / "runs"
    path.write_text(write_run_file("heterofl"), encoding="utf-8")
    command = ("run", str(path), "--host", host, "--seeds", "1,2", "--runs", str(runs))
    first = Command(cache, *command)
    for line in first.lines():
        if line.startswith("round 2:") and (runs / "heterofl-s2").exists():
            first.kill()
            break
    else:
        pytest.fail(f"it ended before it was killed: {first.wait()}")
    assert [(runs / f"heterofl-s{seed}" / "summary.json").exists() for seed in (1, 2)] == [True, False]
    modified_ns = (runs / "heterofl-s1" / "summary.json").stat().st_mtime_ns
    code, output = Command(cache, *command).wait()
    assert code == 0, output
    assert "1 of 2: heterofl-s1 is already finished" in output
    assert ("is resumed in round" in output) == (host == "processes")
    assert (runs / "heterofl-s1" / "summary.json").stat().st_mtime_ns == modified_ns
    calm = tmp_path / "calm"
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(read_run(path, ("seed=2",)), calm, Unobserved(), threading.Event(), exports=exports)
    assert _read_choices(runs / "heterofl-s2") == _read_choices(calm)
    assert (runs / "heterofl-s2" / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
