"""Real processes of every method's run, killed without warning: the run ends with the bits of one that nobody killed.

In `make test` the quickstart is killed (see `test_quickstart`), and servers without processes of their own: with every
method in `test_coordinator_random`, and as worlds whose server is killed, such as of a search in
`test_requested_estimates`.
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
"""Those that choose who takes part, of whom one sits out in each round."""
ROUNDS = {"fedoras": 4, "fedtrans": 8}
"""Of those that have more than three: a network has to grow, or be found, be written and be drawn."""
FIRST_FOUND = {"fedoras": 3}
"""The first round after which devices have a network to evaluate, where that is not the first."""
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
BROUGHT = tuple(
    f'network = {{ family = "mlp", widths = [{width}], depths = [{depth}], group_size = 16 }}'
    for width, depth in ((32, 1), (32, 2), (64, 1))
)
"""What devices bring to FedADP, whose shipped run goes by that."""


class Command:
    """A `subfleet` command that may be killed; what it started ends with it, and is never asked to."""

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
        """Kill one of the processes below this one; whether there was one with one of the words."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if set(words) & set(child.cmdline()):
                child.kill()
                return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ended(self) -> tuple[int, str]:
        output, _ = self._process.communicate(timeout=300)
        return self._process.returncode, output


@pytest.mark.parametrize("name", sorted(METHODS))
def test_whatever_is_killed_the_run_ends_with_the_same_choices_and_bits(
    name: str, cache: CacheFolder, tmp_path: Path
) -> None:
    path, calm, chance = tmp_path / "run.toml", tmp_path / "calm", random.Random(name)
    path.write_text(file_of(name), encoding="utf-8")
    runs = str(tmp_path / "runs")

    first = Command(cache, "run", str(path), "--runs", runs)
    for line in first.lines():
        if line.startswith("round 1:"):
            assert first.kill_child(chance.choice(["pi-4", "phone", "laptop"]))
            time.sleep(chance.uniform(0.0, 2.0))
            first.kill()
            break
    assert not (tmp_path / "runs" / name / "summary.json").exists(), "it was killed before its end"

    second = Command(cache, "runs", "resume", name, "--runs", runs)
    for line in second.lines():
        if line.startswith("Broker at"):
            assert second.kill_child("subfleet.link.broker")
            time.sleep(chance.uniform(1.0, 4.0))
            second.kill()
            break
    else:
        pytest.fail(f"it ended before it was killed: {second.ended()}")

    if not (tmp_path / "runs" / name / "summary.json").exists():
        code, output = Command(cache, "runs", "resume", name, "--runs", runs).ended()
        assert code == 0, output
        assert "round 1:" not in output, "what was aggregated before is not done again"
    hurt = tmp_path / "runs" / name
    settings = read_run(path)
    if (
        not settings.roles.assigner.awaits_programs
    ):  # when programs count is a matter of speed, and is read from what was
        settings = read_replay(hurt)
        assert len(_networks(hurt)) > 1
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(settings, calm, Unobserved(), threading.Event(), exports=exports)
    assert _choices(hurt) == _choices(calm)
    assert _found(hurt) == _found(calm)
    assert (hurt / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()


def file_of(name: str) -> str:
    more = {"fedtrans": GROWING, "fedoras": SEARCHING}.get(name, "")
    model = "model = { widths = [64], depths = [2] }"
    return FILE.format(
        name=name,
        count=2 if name in CHOOSING else 0,
        rounds=ROUNDS.get(name, 3),
        more=more,
        networks=BROUGHT if name == "fedadp" else ("",) * len(BROUGHT),
        model="model = { depths = [1, 1] }" if name == "fedoras" else model,
    )


def _networks(folder: Path) -> set[str]:
    """Those that were trained."""
    return {architecture_id for choices in _choices(folder) for _, architecture_id, *_ in choices if architecture_id}


def _choices(folder: Path) -> list[list[tuple[Any, ...]]]:
    names = ("client_id", "architecture_id", "budget_bytes", "planned_peak_bytes", "limit", "status", "weight")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["rounds"]) == ROUNDS.get(summary["method"], 3)
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["rounds"]]


def _found(folder: Path) -> list[list[tuple[Any, ...]]]:
    """What each device found after each round, once."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rounds = range(FIRST_FOUND.get(summary["method"], 1), ROUNDS.get(summary["method"], 3) + 1)
    assert [one["round"] for one in summary["evaluations"]] == list(rounds)
    names = ("client_id", "architecture_id", "loss", "accuracy", "sample_count", "label_count", "status")
    return [[tuple(row[name] for name in names) for row in record["clients"]] for record in summary["evaluations"]]


@pytest.mark.parametrize("scoring", ["server", "devices"])
def test_a_run_that_is_killed_in_its_search_and_in_fine_tuning_ends_with_the_same_networks_and_bits(
    scoring: str, cache: CacheFolder, tmp_path: Path
) -> None:
    """Killed behind each of two generations, it scores those that are left, and nothing twice; then in fine-tuning."""
    path, calm, runs = tmp_path / "run.toml", tmp_path / "calm", tmp_path / "runs"
    federated = f'search = {{ scoring = "{scoring}", scoring_clients = 2, scoring_rounds = 2, '
    path.write_text(file_of("fedoras").replace("search = { ", federated), encoding="utf-8")
    searched = "search after round 2, generation"
    command, told = Command(cache, "run", str(path), "--runs", str(runs)), list[str]()
    for killed_at in (searched, searched, "round 3:"):
        for line in command.lines():
            told += [line] if line.startswith(searched) else []
            if line.startswith(killed_at):
                command.kill()
                break
        else:
            pytest.fail(f"it ended before it was killed: {command.ended()}")
        command = Command(cache, "runs", "resume", "fedoras", "--runs", str(runs))
    code, output = command.ended()
    assert code == 0, output
    assert searched not in output
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(read_replay(runs / "fedoras"), calm, Unobserved(), threading.Event(), exports=exports)
    hurt, whole = (json.loads((one / "summary.json").read_text()) for one in (runs / "fedoras", calm))
    numbers = [int(line.split("generation ")[1].split(":")[0]) for line in told]
    assert numbers == sorted(set(numbers))
    # Seconds are those of the machine, but for a batch those of its own clock; bytes have what was asked for twice.
    generations = [
        [{**one, "seconds": 0.0, "devices": one["devices"] is not None} for one in summary["generations"]]
        for summary in (hurt, whole)
    ]
    assert generations[0] == generations[1]
    assert len(generations[0]) > 2
    assert all(one["devices"] == (scoring == "devices") for one in generations[0])
    assert _choices(runs / "fedoras") == _choices(calm)
    for name in ("model.safetensors", "supernet.safetensors"):
        assert (runs / "fedoras" / name).read_bytes() == (calm / name).read_bytes()


@pytest.mark.parametrize("host", ["batch", "processes"])
def test_a_killed_sweep_goes_on_with_the_run_that_was_not_over(host: str, cache: CacheFolder, tmp_path: Path) -> None:
    """A batch begins that run anew, as it keeps nothing; with client processes it is taken up where it was."""
    path, runs = tmp_path / "run.toml", tmp_path / "runs"
    path.write_text(file_of("heterofl"), encoding="utf-8")
    command = ("run", str(path), "--host", host, "--seeds", "1,2", "--runs", str(runs))
    first = Command(cache, *command)
    for line in first.lines():
        if line.startswith("round 2:") and (runs / "heterofl-s2").exists():
            first.kill()
            break
    else:
        pytest.fail(f"it ended before it was killed: {first.ended()}")
    assert [(runs / f"heterofl-s{seed}" / "summary.json").exists() for seed in (1, 2)] == [True, False]
    was = (runs / "heterofl-s1" / "summary.json").stat().st_mtime_ns
    code, output = Command(cache, *command).ended()
    assert code == 0, output
    assert "1 of 2: heterofl-s1 is over already" in output
    assert ("is resumed in round" in output) == (host == "processes")
    assert (runs / "heterofl-s1" / "summary.json").stat().st_mtime_ns == was
    calm = tmp_path / "calm"
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(read_run(path, ("seed=2",)), calm, Unobserved(), threading.Event(), exports=exports)
    assert _choices(runs / "heterofl-s2") == _choices(calm)
    assert (runs / "heterofl-s2" / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
