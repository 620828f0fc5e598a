"""The included observers with their real packages, without a network; and observers that fail."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from subfleet import observers
from subfleet.journal.records import ClientRow, RoundRecord, RunObserver
from subfleet.observers import OBSERVERS, observe_run
from subfleet.observers.figures import flatten_parameters, round_figures
from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.registry import Registry
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run
from subfleet.testing import ObserverContract

ROUNDS = 3


class RecordingObserver:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.rounds: list[int] = []

    def say(self, text: str) -> None:
        self.messages.append(text)

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)


def row(name: str, status: str = "aggregated", **changes: Any) -> ClientRow:
    figures: dict[str, Any] = dict.fromkeys(ClientRow.__dataclass_fields__, 0)
    texts = {
        "client_id": name,
        "device": "d",
        "runtime": "onnx",
        "architecture": "w1",
        "architecture_id": "1",
        "status": status,
    }
    empty_texts = dict.fromkeys(("requested", "refusals", "lowered", "outlier", "limit"), "")
    return ClientRow(**{**figures, **empty_texts, **texts, **changes})


def record(number: int) -> RoundRecord:
    aggregated = row("a", planned_peak_bytes=10, budget_bytes=20, measured_peak_bytes=8, bytes_down=100, bytes_up=50)
    skipped = row("b", "skipped: away", bytes_down=7)
    return RoundRecord(
        round=number,
        accuracy=number / 10,
        loss=1.0 / number,
        seconds=2.0,
        log_time_s=None,
        clients=(aggregated, skipped),
    )


def run_with(*names: str) -> Run:
    return read_run("quickstart", ("name=watched-s3", f"observers={list(names)}"))


def play(run: Run, folder: Path) -> RecordingObserver:
    folder.mkdir(parents=True, exist_ok=True)
    recording = RecordingObserver()
    with observe_run(run, folder, recording) as observer:
        observer.say("it begins")
        for number in range(1, ROUNDS + 1):
            observer.round_finished(record(number))
    return recording


def test_a_round_in_numbers() -> None:
    figures = round_figures(record(2))
    assert (figures["accuracy"], figures["loss"], figures["participation"]) == (0.2, 0.5, 0.5)
    assert (figures["bytes_down"], figures["bytes_up"], figures["submodels"]) == (107.0, 50.0, 1.0)
    assert (figures["planned_peak_bytes"], figures["measured_peak_bytes"], figures["utilisation"]) == (10.0, 8.0, 0.5)


def test_parameters_are_the_outcome_settings_by_dotted_key() -> None:
    parameters = flatten_parameters(run_with("tensorboard"))
    assert parameters["method.type"] == "heterofl"
    assert parameters["training.learning_rate"] == "0.08"
    assert not [key for key in parameters if key.startswith(("deadlines", "host", "observers"))]
    assert all(len(value) <= 250 for value in parameters.values())


@pytest.mark.slow
def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    accumulating = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    play(run_with("tensorboard"), tmp_path)
    events = accumulating.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(round_figures(record(1)))
    values = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert values == [(number, pytest.approx(number / 10)) for number in range(1, ROUNDS + 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_an_experiment_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for seed in ("1", "2"):
        play(run_with("mlflow"), tmp_path / seed)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("watched")
    runs = client.search_runs([experiment.experiment_id])
    assert [tracked.info.status for tracked in runs] == ["FINISHED"] * 2
    assert runs[0].data.params["method.type"] == "heterofl"
    history = client.get_metric_history(runs[0].info.run_id, "accuracy")
    assert sorted((metric.step, metric.value) for metric in history) == [(number, number / 10) for number in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    play(run_with("wandb"), tmp_path)
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content, until_s = (
        b"",
        time.monotonic() + 20,
    )  # wandb writes in a process of its own, which may take a while on a busy machine
    while b"heterofl" not in content or content.count(b"participation") < ROUNDS:
        assert time.monotonic() < until_s, f"{len(content)} bytes, without settings or rounds"
        time.sleep(0.05)
        content = written.read_bytes()
    assert all(word in content for word in (b"accuracy", b"participation", b"heterofl"))


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_without_its_package_the_extra_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'subfleet\[{name}\]'"):
        play(run_with(name), tmp_path)


def test_an_unknown_observer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        play(run_with("mlflo"), tmp_path)
    assert set(OBSERVERS.names) >= {"mlflow", "tensorboard", "wandb"}


@contextmanager
def failing(run: Run, folder: Path) -> Iterator[RunObserver]:
    class Failing:
        def say(self, text: str) -> None:
            raise ZeroDivisionError(text)

        def round_finished(self, record: RoundRecord) -> None:
            raise ZeroDivisionError

    yield Failing()


RECORDING = RecordingObserver()


@contextmanager
def hearing(run: Run, folder: Path) -> Iterator[RunObserver]:
    yield RECORDING


def test_a_failing_observer_ends_neither_the_run_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local: Mapping[str, str] = {"failing": f"{__name__}:failing", "hearing": f"{__name__}:hearing"}
    entries = [EntryPoint(name, value, "subfleet.observers") for name, value in local.items()]
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["observers.test_observers"])
    monkeypatch.setattr(observers, "OBSERVERS", Registry("subfleet.observers", "observer", find=lambda group: entries))
    recording = play(run_with("failing", "hearing"), tmp_path)
    assert recording.rounds == RECORDING.rounds == [1, 2, 3]
    assert RECORDING.messages == ["it begins"]


ENDED: list[str] = []


@contextmanager
def ending_badly(run: Run, folder: Path) -> Iterator[RunObserver]:
    try:
        yield RecordingObserver()
    except RuntimeError:
        ENDED.append("hidden")
    ENDED.append("ended")
    raise ZeroDivisionError("at the end")


@pytest.mark.parametrize("failing", [False, True])
def test_an_error_at_the_end_of_an_observer_is_logged_and_ends_nothing(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [EntryPoint("ending", f"{__name__}:ending_badly", "subfleet.observers")]
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["observers.test_observers"])
    monkeypatch.setattr(observers, "OBSERVERS", Registry("subfleet.observers", "observer", find=lambda group: entries))
    ENDED.clear()
    if failing:
        with (
            pytest.raises(RuntimeError, match="the run fails"),
            observe_run(run_with("ending"), tmp_path, RecordingObserver()),
        ):
            raise RuntimeError("the run fails")
    else:
        assert play(run_with("ending"), tmp_path).rounds == [1, 2, 3]
    assert ["hidden"] * failing + ["ended"] == ENDED
    assert "the observer 'ending' raised ZeroDivisionError at its end: at the end" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestTensorboard(ObserverContract):
    observer = "tensorboard"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestMlflow(ObserverContract):
    observer = "mlflow"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestWandb(ObserverContract):
    observer = "wandb"


@contextmanager
def breaking(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Works once in a folder, accepts only numbers, and hides errors."""
    (folder / "made").mkdir()

    class Breaking:
        def say(self, text: str) -> None:
            """Ignored."""

        def round_finished(self, record: RoundRecord) -> None:
            int(record.loss or 0.0)

    with suppress(RuntimeError):
        yield Breaking()


@pytest.mark.parametrize(
    ("test", "error"),
    [
        (ObserverContract.test_it_hears_a_run_from_its_begin_to_its_end, ValueError),
        (ObserverContract.test_a_run_that_is_taken_up_is_heard_again, FileExistsError),
        (ObserverContract.test_a_run_that_fails_is_not_hidden, pytest.fail.Exception),
    ],
)
def test_the_contract_detects_faulty_observers(
    test: Callable[[ObserverContract, Path], None], error: type[BaseException], tmp_path: Path
) -> None:
    contract = ObserverContract()
    contract.observer = hearing
    test(contract, tmp_path / "sound")
    contract.observer = breaking
    (tmp_path / "broken").mkdir()
    with pytest.raises(error):
        test(contract, tmp_path / "broken")
