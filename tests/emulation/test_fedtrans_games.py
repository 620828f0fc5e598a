"""FedTrans' games are played for a few rounds, each entry with the network that its file states."""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.emulation.batch.host import run_in_batch
from subfleet.emulation.gathering import gather_run
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.settings.fingerprint import list_changes, select_outcome_settings
from subfleet.settings.reading import read_runs
from subfleet.settings.run import Run
from subfleet.settings.run_folder import read_description, write_description
from subfleet.settings.stored_networks import read_networks, resolve_model

pytestmark = pytest.mark.slow

DATA = os.environ.get("SUBFLEET_DATA", "")
LOGS = Path(DATA) / "memory" / "phone_top_1s.csv"
with_logs = pytest.mark.skipif(not DATA or not LOGS.exists(), reason="SUBFLEET_DATA has no logs of the league")

GAMES = ("ablation", "game", "heterogeneity", "models", "sensitivity", "vit")
SMALL = (
    *("rounds=2", "training.epochs=1", "data.samples=300", "data.test_samples=200", "data.partition.min_samples=2"),
    *("fleet.devices.0.count=4", "min_clients=4", 'targets=["torch"]', "fleet.devices.0.runtime=torch"),
    *("memory_overhead_bytes={ torch = 0 }", "fleet.devices.0.population=mixed", "data.name=digits"),
)
EARLY = ("method.beta=1e9", "method.gamma=1", "method.delta=1")
"""A network grows as soon as two rounds have measured its loss."""


def read_small_runs(game: str) -> Iterator[Run]:
    """A game's runs with one seed on four devices, with digits and the logs of the package."""
    for run in read_runs(f"fedtrans-{game}", (*SMALL, *EARLY), (1,)):
        shape: dict[str, Any] = {"input_shape": (1, 8, 8)} | ({"patch": 2} if game == "vit" else {})
        yield replace(run, model=replace(run.model, **shape))


def play(run: Run, runs: Path, exports: ExportPool) -> Mapping[str, Any]:
    """Play a run in its own folder; its model may come from another run in `runs`."""
    run, folder = resolve_model(run, runs), runs / run.name
    folder.mkdir(parents=True)
    write_description(folder, run)
    run_in_batch(run, folder, Unobserved(), threading.Event(), exports=exports)
    summary: Mapping[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def entries(game: str) -> dict[str, Run]:
    return {run.name.removeprefix(f"fedtrans-{game}-").removesuffix("-s1"): run for run in read_small_runs(game)}


@pytest.mark.export
@pytest.mark.parametrize(
    ("game", "names"),
    [
        ("game", ("heterofl", "fedavg-smallest")),
        pytest.param("vit", ("heterofl",), marks=pytest.mark.long),
        *(
            pytest.param(game, names, marks=pytest.mark.long)
            for game, names in (
                (
                    "game",
                    (
                        "fluid",
                        "fedavg-oracle",
                        "fedprox-middle",
                        "fedyogi-middle",
                        "fedtrans-fedyogi",
                        "fedtrans-fedprox",
                    ),
                ),
                ("models", ("largest", "largest-fresh", "mobilenet_v3_small", "efficientnet_v2_tiny")),
                ("ablation", ("lswd", "lsw", "large-to-small", "crop")),
            )
        ),
    ],
)
def test_a_game_is_played_with_the_networks_of_fedtrans(
    game: str, names: tuple[str, ...], exports: ExportPool, tmp_path: Path
) -> None:
    runs = entries(game)
    play(runs["fedtrans"], tmp_path, exports)
    networks = read_networks(tmp_path / runs["fedtrans"].name)
    assert len(networks) >= 2, "the first one and one that grew from it"
    for name in names:
        summary = play(runs[name], tmp_path, exports)
        assert [record["aggregated"] > 0 for record in summary["rounds"]] == [True, True]
        description = read_description(tmp_path / runs[name].name)
        if runs[name].model_of is not None:
            network = networks[0] if "smallest" in name or "middle" in name else networks[-1]
            assert description.model == network.lineage.config
            full_network = network_of(network.lineage.config)
            max_parameters = max(row["parameters"] for record in summary["rounds"] for row in record["clients"])
            assert max_parameters <= Costs(full_network).of([full_network.full_architecture()])[0][0]
            assert (name != "fedavg-smallest") or max_parameters == Costs(full_network).of(
                [full_network.full_architecture()]
            )[0][0]


ABLATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fedtrans": (),
        "l": ("cells",),
        "ls": ("cells", "share"),
        "lsw": ("cells", "share", "warm_up"),
        "lswd": ("cells", "warm_up", "decay"),
        "s": ("share",),
        "w": ("warm_up",),
        "d": ("decay",),
        "large-to-small": ("large_to_small",),
        "crop": ("share",),
    }
)
CHANGED_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"fedtrans-fedprox": "method.mu", "fedtrans-fedyogi": "server_optimiser"}
)


def expect_changes(game: str, name: str) -> set[str]:
    """The settings in which an entry differs from the first one, according to its name."""
    if game == "sensitivity" and name != "as-played":
        return {f"method.{name.split('-', maxsplit=1)[0]}"}
    if game == "heterogeneity" and name != "fedtrans-0.1":
        return {"data.partition.alpha"}
    if game == "ablation":
        return {f"method.{key}" for key in ABLATED[name]}
    return {CHANGED_SETTINGS[name]} if name in CHANGED_SETTINGS else set()


@pytest.mark.parametrize("game", GAMES)
def test_entries_differ_in_the_settings_of_their_names(game: str) -> None:
    runs = {
        run.name.removeprefix(f"fedtrans-{game}-").removesuffix("-s1"): run
        for run in read_runs(f"fedtrans-{game}", (), (1,))
    }
    base = next(iter(runs.values()))
    assert base.method.TYPE == "fedtrans"
    for name, run in runs.items():
        if run.model_of is not None or run.method.TYPE != "fedtrans":
            continue
        changed = list_changes(select_outcome_settings(base), select_outcome_settings(replace(run, name=base.name)))
        keys = set(re.findall(r"(?:^|, )([\w.]+) from ", changed))
        assert keys == expect_changes(game, name), name


@with_logs
@pytest.mark.long
def test_samples_can_be_split_with_the_lowest_alpha_of_the_sweep() -> None:
    runs = [run for run in read_runs("fedtrans-heterogeneity") if run.model_of is None]
    lowest = min(run.data.partition.alpha for run in runs)
    selected = [run for run in runs if run.data.partition.alpha == lowest]
    assert [run.seed for run in selected] == [1, 2, 3]
    for run in selected:
        assert len(gather_run(run).devices) == 50


def test_published_networks_come_in_the_order_of_their_cost() -> None:
    published = [run.model for run in read_runs("fedtrans-models", (), (1,)) if run.model.TYPE != "nas_bench_201"]
    costs = [Costs(network).of([network.full_architecture()])[0][1] for network in map(network_of, published)]
    assert len(costs) == 7
    assert costs == sorted(costs)
