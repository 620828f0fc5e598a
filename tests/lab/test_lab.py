"""The Python API, as the how-to page shows it: load a run, run it, look at the result."""

import json
import sys
from pathlib import Path

import pytest

from subfleet.export.cache import CacheFolder
from subfleet.lab import Result, load, load_all, run
from subfleet.protocol.errors import ConfigError, FileError, MissingExtraError

pytestmark = [pytest.mark.slow, pytest.mark.export]


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


def test_a_wrong_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no devices to emulate"):
        run(load("fleet"), runs=tmp_path / "runs")
    with pytest.raises(FileError, match=r"nothing/run\.json cannot be read"):
        run(load("fedavg", "model_of.run=nothing"), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert [settings.seed for settings in load_all("fedavg", seeds=(4, 5))] == [4, 5]
