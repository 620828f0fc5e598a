"""The league's games are played for a round, and their fleets are those of the published tables."""

import hashlib
import json
import os
import threading
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrices import mostly_long

from subfleet.device_profiles.drawing import draw_devices
from subfleet.device_profiles.populations import load_population
from subfleet.elastic.building import network_of
from subfleet.elastic.spaces import uniform_space
from subfleet.emulation.batch.host import run_in_batch
from subfleet.emulation.gathering import gather_run
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.methods.sizes import list_widths
from subfleet.protocol.schema import canonical_json
from subfleet.settings.reading import read_runs
from subfleet.settings.run import Run

pytestmark = pytest.mark.slow

DATA = os.environ.get("SUBFLEET_DATA", "")
LOGS = Path(DATA) / "memory" / "phone_top_1s.csv"
with_logs = pytest.mark.skipif(not DATA or not LOGS.exists(), reason="SUBFLEET_DATA has no logs of the league")

FLEET = "4af088d0583a3a66791d87c1c5346eaf478529ca0eb5705d76ad7fd2c31e42d1"
"""A digest of the kinds, memory fractions and logs of the 50 devices in the tables of 0ce1125 and ae35b7e."""
LABELS = {
    "league": "e627012cf30c5db06b2595581c760095286f09187165f44bb8e0a4f3e505eae5",
    "league-width": "fb0daaf383e0141fe2d5cadcd02c9eaa396b25606fd0346512ab683ae502d14c",
}
"""Digests of the class counts of these devices with seed 1, including held-out samples."""

SMALL = ("rounds=1", "training.epochs=1", "data.samples=600", "data.test_samples=200", "data.partition.min_samples=2")


@with_logs
def test_the_fleet_is_the_one_of_the_published_tables() -> None:
    devices = draw_devices(load_population("league"), 50, seed="any", data=Path(DATA))
    rows = [
        [
            device.profile.name,
            device.profile.memory_fraction,
            [[row.t_s, *astuple(row.reading)] for row in device.log.rows],
        ]
        for device in devices
    ]
    assert hashlib.sha256(canonical_json(rows)).hexdigest() == FLEET


@with_logs
@pytest.mark.parametrize("name", mostly_long(sorted(LABELS), "league"))
def test_every_device_has_as_many_samples_of_each_class_as_in_the_published_tables(name: str) -> None:
    gathered = gather_run(read_runs(name, (), (1,))[0])
    assert len(gathered.devices) == 50
    counts = [
        np.bincount(np.concatenate([device.data.labels, device.test.labels]), minlength=10).tolist()
        for device in gathered.devices
        if device.test is not None
    ]
    assert hashlib.sha256(str(counts).encode()).hexdigest() == LABELS[name]


@pytest.mark.parametrize("name", ["league-depth", "league-width", "league-both"])
def test_links_carry_the_architectures_of_the_space(name: str) -> None:
    run = read_runs(name, (), (1,))[0]
    network = network_of(run.model)
    space = list_widths if name == "league-width" else uniform_space
    sizes = sorted(4 * network.parameter_count(architecture) for architecture in space(network, run.rates))
    carried = [_carried_bytes(run, index) for index in range(40)]
    assert carried == [sizes[0]] * 25 + [sizes[index * len(sizes) // 15] for index in range(15)]
    assert [device.tier for device in run.fleet.expand_devices()][40:] == ["attackers"] * 10


def _carried_bytes(run: Run, index: int) -> int:
    steady = run.fleet.expand_devices()[index].steady
    assert steady is not None
    assert steady.downlink_bps is not None
    return int(steady.downlink_bps * run.communication_s / 8) - 64


@pytest.mark.parametrize("name", ["league-depth", "league-width", "league-both"])
def test_only_devices_of_the_tier_attackers_attack(name: str) -> None:
    for run in read_runs(name, (), (1,)):
        attacking = {device.tier for device in run.fleet.expand_devices() if device.attack is not None}
        assert attacking == (set() if "-honest-" in run.name else {"attackers"}), run.name


@pytest.mark.export
@pytest.mark.parametrize(
    "game",
    [
        "league-heterofl-s1",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("league-fedavg-oracle-s1", "league-nefl-s1")),
    ],
)
def test_a_round_of_the_league(game: str, exports: ExportPool, tmp_path: Path) -> None:
    devices = ["fleet.devices.0.count=8", "min_clients=8"]
    if not LOGS.exists() or not DATA:
        devices.append('fleet.devices.0.population="mixed"')
    run = _find_run(game, read_runs("league", (*SMALL, *devices, *_samples()), (1,)))
    summary = _play(run, tmp_path, exports)
    (record,) = summary["rounds"]
    assert len(record["clients"]) == 8
    assert record["aggregated"] == 8 if "oracle" in game else record["aggregated"] >= 4
    accuracies = [accuracy for accuracy in summary["figures"]["tiers"].values() if accuracy is not None]
    assert accuracies
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    is_complete = len(accuracies) == len(summary["figures"]["tiers"])
    assert summary["figures"]["worst_tier"] == (min(accuracies) if is_complete else None)
    assert set(summary["figures"]["own"]) == {
        row["client_id"] for row in record["clients"] if row["status"] == "aggregated"
    }
    assert "backdoor" not in summary["figures"]


@pytest.mark.export
@pytest.mark.parametrize(
    "game",
    mostly_long(
        ["league-depth-flexifed-shuffled-s1", "league-width-heterofl-backdoor-s1", "league-both-nefl-shuffled-1-s1"],
        "league-width-heterofl-backdoor-s1",
    ),
)
def test_a_round_of_the_league_under_attack(game: str, exports: ExportPool, tmp_path: Path) -> None:
    name = "-".join(game.split("-")[:2])
    last = len(read_runs(name, (), (1,))[0].fleet.devices) - 1
    few = [f"fleet.devices.{index}.count=1" for index in range(last)] + [f"fleet.devices.{last}.count=2"]
    devices = (*few, f"min_clients={last + 2}", "clients_per_round=0")
    run = _find_run(game, read_runs(name, (*SMALL, *devices, *_samples()), (1,)))
    summary = _play(run, tmp_path, exports)
    assert summary["rounds"][0]["aggregated"] == last + 2
    assert set(summary["figures"]["tiers"]) == {"smallest", "others", "attackers"}
    assert ("backdoor" in summary["figures"]) == ("backdoor" in game)


def _samples() -> tuple[str, ...]:
    """Settings for the included digits where Fashion-MNIST is missing."""
    if DATA and (Path(DATA) / "fashion_mnist").is_dir():
        return ()
    return ("data.name=digits", "model.input_shape=[1, 8, 8]")


def _find_run(name: str, runs: tuple[Run, ...]) -> Run:
    (match,) = (run for run in runs if run.name == name)
    return match


def _play(run: Run, folder: Path, exports: ExportPool) -> dict[str, Any]:
    run_in_batch(run, folder, Unobserved(), threading.Event(), exports=exports)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary
