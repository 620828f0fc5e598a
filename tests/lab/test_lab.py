"""The Python API, as the how-to page shows it: load a run, run it, look at the result."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared_programs import share_exporter
from torch import Tensor, nn

from subfleet.elastic.model_state import unpack_state
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.lab import Result, load, load_all, run
from subfleet.protocol.errors import ConfigError, FileError, MissingExtraError
from subfleet.tasks import load_digits

pytestmark = [pytest.mark.slow, pytest.mark.export]


@pytest.fixture(scope="module", autouse=True)
def one_exporter(exports: ExportPool) -> Iterator[None]:
    with share_exporter(exports):
        yield


@pytest.fixture(scope="module")
def result(cache: CacheFolder, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("lab")
    run_settings = load(
        "fedavg", "rounds=2", "host.type=batch", "training.epochs=1", "deploy_targets=[]", 'observers=["tensorboard"]'
    )
    return run(run_settings, runs=folder / "runs", cache=cache)


def test_a_result_has_rounds_clients_and_the_model(result: Result) -> None:
    assert [record.round for record in result.rounds] == [1, 2]
    assert result.accuracy == result.rounds[-1].accuracy
    assert [(record.round, record.client.client_id) for record in result.clients][:2] == [(1, "jetson"), (1, "laptop")]
    assert len(result.clients) == 10
    assert result.model.exists()
    assert (result.folder / "report.html").exists()
    assert json.loads((result.folder / "run.json").read_text(encoding="utf-8"))["method"]["type"] == "fedavg"
    assert list((result.folder / "tensorboard").iterdir())


def test_a_frame_has_a_row_for_each_client_and_round(result: Result) -> None:
    frame = result.frame()
    assert len(frame) == 10
    assert set(frame["client_id"]) == {"pi-zero-2w", "pi-4", "phone", "jetson", "laptop"}
    assert frame.groupby("round")["accuracy"].first().tolist() == [record.accuracy for record in result.rounds]


def test_without_pandas_the_extra_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"subfleet\[pandas\]"):
        result.frame()


class Net(nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 24), nn.Linear(64, 8)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        logits: Tensor = self.head(torch.relu(self.norm(torch.cat([self.wide(flat), self.narrow(flat)], 1))))
        return logits


def compare_classes(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 10 * (outputs.softmax(1) - nn.functional.one_hot(labels, 10)).square().mean(1)


def test_a_module_is_trained_from_its_own_weights_and_takes_the_trained_ones(
    cache: CacheFolder, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.random.set_rng_state(torch.Generator().manual_seed(1).get_state())
        network = Net()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    still = load("fedavg", "rounds=1", "host.type=batch", "training.learning_rate=0.0", "deploy_targets=[]")
    trained = load("fedavg", "rounds=3", "host.type=batch", "training.epochs=2", "deploy_targets=[]")
    results = [
        run(described, model=network, loss=compare_classes, runs=tmp_path / "runs", cache=cache)
        for described in (still, trained)
    ]
    first = results[0].rounds[0].clients[0]
    assert first.loss is not None
    assert first.loss < 1.5, "10 squared errors of about 0.1, and no cross-entropy of a guess, which is 2.3"
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    weights = [dict(unpack_state(load_file(result.model)).shared) for result in results]
    assert all(torch.equal(weights[0][name], before[name]) for name in ("wide.weight", "narrow.weight", "head.bias"))
    network.load_state_dict(weights[1])
    digits = load_digits()
    images = torch.from_numpy(digits.inputs)
    accuracy = (network.eval()(images).argmax(1) == torch.from_numpy(digits.labels)).float().mean()
    assert results[1].accuracy is not None
    assert accuracy > 0.5 < results[1].accuracy


def test_a_module_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fails in layer '0' for inputs of shape"):
        run(load("fedavg", "host.type=batch"), model=nn.Sequential(nn.Linear(7, 10)), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_loss_needs_its_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a loss is given without a model; give both"):
        run(load("fedavg", "host.type=batch"), loss=nn.L1Loss(reduction="none"), runs=tmp_path / "runs")


def test_a_wrong_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no devices to emulate"):
        run(load("fleet"), runs=tmp_path / "runs")
    with pytest.raises(FileError, match=r"nothing/run\.json cannot be read"):
        run(load("fedavg", "model_of.run=nothing"), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert [settings.seed for settings in load_all("fedavg", seeds=(4, 5))] == [4, 5]
