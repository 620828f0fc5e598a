"""FedorAS' games in `benchmarks/fedoras`: they can be read, and a short one passes through all stages."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from subfleet.cli.run_networks import load_network, write_path
from subfleet.elastic.building import build_module, network_of
from subfleet.emulation.batch.host import run_in_batch
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.methods.fedoras import FedorAS
from subfleet.protocol.errors import ConfigError
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run
from subfleet.settings.run_folder import SUPERNET, write_description

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "benchmarks" / "fedoras"


@pytest.fixture(autouse=True)
def _in_the_projects_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files name device profiles relative to the project folder."""
    monkeypatch.chdir(ROOT)


def entries(game: str) -> dict[str, Run]:
    return {run.name.removesuffix("-s1").rpartition(f"{_name(game)}-")[2]: run for run in _runs(game)}


def _runs(game: str) -> tuple[Run, ...]:
    return tuple(read_runs(GAMES / f"{game}.toml", (), (1,)))


def _name(game: str) -> str:
    return "fedoras-cifar10" if game in ("others", "ablation") else f"fedoras-{game}"


@pytest.mark.parametrize(
    ("game", "names"),
    [
        ("cifar10", {"opa", "averaging", "fresh"}),
        ("speech", {"opa", "averaging", "fresh"}),
        ("shakespeare", {"opa", "averaging"}),
        ("others", {"fjord", "oort", "pyramidfl"}),
    ],
)
def test_entries_differ_only_in_their_named_settings(game: str, names: set[str]) -> None:
    runs = entries(game)
    assert set(runs) == names
    assert len({run.fleet for run in runs.values()}) == 1
    assert len({run.rounds for run in runs.values()}) == 1
    assert len({run.data for run in runs.values()}) == 1


def test_ablations_are_those_of_the_paper() -> None:
    runs = {"half": entries("cifar10")["opa"], **entries("ablation")}
    methods = {name: run.method for name, run in runs.items()}
    assert all(isinstance(method, FedorAS) for method in methods.values())
    shares = {name: method.subspace for name, method in methods.items() if isinstance(method, FedorAS)}
    assert (shares["whole"], shares["half"], shares["quarter"]) == (1.0, 0.5, 0.25)
    samples = {name: run.data.validation_samples for name, run in runs.items()}
    assert [samples[name] for name in ("validation-20", "half", "validation-50")] == [400, 500, 1000]  # of 2,000
    silos = runs["silos"]
    assert len(silos.fleet.expand_devices()) == 8
    assert not silos.clients_per_round  # all take part


def test_other_methods_have_the_devices_and_the_samples_of_the_game() -> None:
    game, runs = entries("cifar10")["opa"], entries("others")
    for run in runs.values():
        assert (run.fleet, run.data, run.rounds, run.clients_per_round) == (
            game.fleet,
            game.data,
            game.rounds,
            game.clients_per_round,
        )
        assert not network_of(run.model).choices


OPERATORS = ["conv1", "mbconv1_double", "mbconv3", "identity"]
"""A few: each operator of each block is a program."""


@pytest.mark.export
@pytest.mark.long
@pytest.mark.parametrize("scoring", ["server", "devices"])
def test_a_short_game_goes_from_a_supernet_to_a_network_for_each_tier(
    scoring: str, cache: CacheFolder, tmp_path: Path
) -> None:
    evolution = "{ evaluations = 4, population = 2, offspring = 2 }"
    search = f"{{ scoring = '{scoring}', scoring_clients = 2, scoring_rounds = 2, evolution = {evolution} }}"
    run = read_run(
        "fedoras",
        (
            *("rounds=4", "training.epochs=1", "deploy_targets=[]", "data.held_out=0.2", "method.supernet_rounds=2"),
            *(f"method.search={search}", "model.widths=[8, 16]", f"model.operators=[{OPERATORS}]"),
        ),
    )
    with ExportPool(cache, workers=1) as exports:
        run_in_batch(run, tmp_path / "run", Unobserved(), threading.Event(), exports=exports)
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    first, *networks = summary["networks"]
    assert (first["retired_round"], [network["network"] for network in networks]) == (2, ["t1", "t2"])
    assert all(network["trained_rounds"] for network in networks)
    assert {generation["tier"] for generation in summary["generations"]} == {1, 2}
    assert sum(generation["paths"] for generation in summary["generations"]) == 8
    device_scores = [generation["devices"] for generation in summary["generations"]]
    assert [scores is not None for scores in device_scores] == [scoring == "devices"] * len(device_scores)
    for scores in filter(None, device_scores):
        assert (scores["rounds"], scores["answers"], len(scores["ranks"])) == (2, 4, 2)
        assert 0 < scores["supernet_bytes"] < first["weight_bytes"]
        assert scores["bytes_down"] >= scores["answers"] * scores["supernet_bytes"]
    assert (tmp_path / "run" / SUPERNET).exists()
    best = [
        max(generation["best"] for generation in summary["generations"] if generation["tier"] == tier)
        for tier in (1, 2)
    ]
    accuracies = [network["own_mean"] for network in networks if network["own_mean"] is not None]
    assert summary["tuning"]["networks"] == len(accuracies)
    # A device that trained only the supernet, which is retired, has a network as well.
    assert all(summary["figures"]["tiers"].values())
    if len(accuracies) == 2 and best[0] != best[1] and accuracies[0] != accuracies[1]:
        assert summary["tuning"]["tau"] == (1.0 if (best[0] < best[1]) == (accuracies[0] < accuracies[1]) else -1.0)
    write_description(tmp_path / "run", run)
    for row in networks:
        tier = load_network(tmp_path / "run", row["network"])
        written = write_path(tier, tier.network.full_architecture(), ("onnx",), tmp_path / row["network"], cache=cache)
        assert (written["parameters"], written["forward_macs"]) == (row["parameters"], row["forward_macs"])
        session = ort.InferenceSession(written["files"]["onnx"])
        sample = np.random.default_rng(1).random((1, *run.model.input_shape), dtype=np.float32)
        module = build_module(tier.network, tier.network.full_architecture()).eval()
        module.load_state_dict(dict(tier.state))
        (logits,) = session.run(None, {session.get_inputs()[0].name: sample})
        np.testing.assert_allclose(logits, module(torch.from_numpy(sample)).detach(), atol=1e-4)
    with pytest.raises(ConfigError, match="ended without a network 't9'"):
        load_network(tmp_path / "run", "t9")
