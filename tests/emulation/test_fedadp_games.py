"""FedADP's games: the networks of the clients, and two rounds of the entries."""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from subfleet.elastic.building import network_of
from subfleet.elastic.unions import unite_families
from subfleet.emulation.batch.host import run_in_batch
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.settings.reading import read_runs
from subfleet.settings.run import Run

pytestmark = pytest.mark.slow

SMALL = (
    *("rounds=2", "training.epochs=1", "data.name=digits", "data.samples=120", "data.test_samples=50"),
    *("data.partition.min_samples=2", "model.input_shape=[1, 8, 8]", 'targets=["torch"]'),
    *(f"fleet.devices.{index}.runtime=torch" for index in range(6)),
    "memory_overhead_bytes={ torch = 0 }",
)


def entries(game: str, *changes: str) -> dict[str, Run]:
    runs = read_runs(game, changes, (1,))
    return {run.name.removeprefix(f"{game}-").removesuffix("-s1"): run for run in runs}


@pytest.mark.parametrize(
    ("game", "clients", "kinds"), [("fedadp-vgg", 20, 8), ("fedadp-vgg-small", 12, 6), ("fedadp-game", 12, 6)]
)
def test_clients_have_the_networks_of_the_paper_in_all_entries(game: str, clients: int, kinds: int) -> None:
    runs = entries(game)
    assert set(runs) >= {"fedadp", "fedadp-paper", "flexifed-basic", "flexifed-clustered", "flexifed-max", "standalone"}
    fleets = {run.fleet for run in runs.values()}
    assert len(fleets) == 1
    networks = Counter(device.network for device in fleets.pop().expand_devices())
    assert (sum(networks.values()), len(networks)) == (clients, kinds)
    if game == "fedadp-vgg":
        (largest,) = [family for family, count in networks.items() if count == 6]
        depths = {len(network_of(family).cells) for family in networks if family is not None}
        assert largest is not None
        assert (len(network_of(largest).cells), depths) == (16, {10, 11, 12, 13, 14, 15, 16}), (
            "VGG-19 has 16 convolutions"
        )
        run = runs["fedadp-paper"]
        training = run.training
        assert (run.rounds, training.epochs, training.batch_size, training.round_fraction) == (200, 10, 64, 0.2)
        assert training.learning_rate == 0.01


def test_the_eight_networks_of_the_paper_have_one_union() -> None:
    run = entries("fedadp-vgg")["fedadp"]

    networks = [device.network for device in run.fleet.expand_devices() if device.network is not None]
    union = network_of(unite_families(list(dict.fromkeys(networks))))
    wider = next(
        network
        for network in networks
        if len(network_of(network).cells) == 16 and getattr(network, "layer_widths", None)
    )
    assert union.config == wider, "it is VGG-19-Wider"


SOME = frozenset({"fedadp", "standalone"})


@pytest.mark.long
@pytest.mark.parametrize("all_entries", [True, False])
def test_two_rounds_of_the_entries_in_which_all_take_part(
    all_entries: bool, exports: ExportPool, tmp_path: Path
) -> None:
    losses = {}
    for name, run in entries("fedadp-game", *SMALL).items():
        if not all_entries and name not in SOME:
            continue
        run_in_batch(run, tmp_path / name, Unobserved(), threading.Event(), exports=exports)
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        assert summary["participation"] == 1.0
        architectures = {row["client_id"]: row["architecture_id"] for row in summary["rounds"][0]["clients"]}
        assert len(set(architectures.values())) == 6
        assert set(summary["figures"]["tiers"]) == {"shallow", "two", "three", "four", "three-wider", "four-wider"}
        losses[name] = summary["rounds"][-1]["loss"]
    count = 4 if all_entries else len(SOME)
    assert len({f"{loss:.6f}" for loss in losses.values()}) >= count, "their losses differ"
