"""Attackers in virtual fleets: their training data and their updates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from emulation.batch_cases import experiment, part

from subfleet import tasks
from subfleet.arrays import decode_arrays
from subfleet.emulation.batch.figures import compute_batch_figures
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.batch.trainers import AttackingTrainer
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.poisoning import poison_dataset
from subfleet.export.pool import ExportPool
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, TrainResult
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.fleet import Attack, Backdoor, DeviceSettings, FleetSettings, LabelShuffling
from subfleet.settings.reading import read_run
from subfleet.trainers.job_files import write_change


class SummingTrainer:
    """A trainer that returns the weighted sum of its labels as its change."""

    target: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)
    held_bytes = 0

    def describe_runtime(self) -> str:
        return "a test's"

    def describe(self, data: str) -> DataSummary:
        return tasks.read_dataset(data).summary()

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        write_change(job, {"w": weigh_labels(tasks.read_dataset(job.data))})
        return TrainResult(
            sample_count=3, step_count=1, loss=1.0, accuracy=0.5, measured_peak_bytes=7, train_seconds=0.0
        )

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        raise NotImplementedError

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        return 4.0

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        return EvaluationResult(loss=1.0, accuracy=0.5, sample_count=2, label_count=2, measured_peak_bytes=0)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        raise NotImplementedError


def weigh_labels(dataset: tasks.Dataset) -> npt.NDArray[np.float32]:
    return np.array([np.dot(np.arange(len(dataset)), dataset.classes())], np.float32)


def train_attacker(tmp_path: Path, attack: Attack) -> npt.NDArray[np.generic]:
    tasks.write_npz(tmp_path / "data.npz", part(0))
    job = Job(
        work=Train(settings=TrainingSettings()),
        program_path=tmp_path / "none",
        weights_path=tmp_path / "none",
        output_path=tmp_path / "change",
        data=str(tmp_path / "data.npz"),
        round=1,
        client_id="eve",
        memory_limit_bytes=10**6,
    )
    assert AttackingTrainer(SummingTrainer(), attack).train(job, lambda: False).measured_peak_bytes == 7
    # The files of the poisoned data and of the second training are removed.
    assert {path.name for path in tmp_path.iterdir()} == {"data.npz", "change"}
    return decode_arrays(job.output_path.read_bytes())["w"]


def test_shuffled_labels_come_on_top_of_the_honest_change(tmp_path: Path) -> None:
    attack = LabelShuffling(strength=2.0, seed=3)
    honest, malicious = weigh_labels(part(0)), weigh_labels(poison_dataset(attack, part(0)))
    assert honest != malicious
    np.testing.assert_array_equal(train_attacker(tmp_path, attack), honest + 2 * malicious)


def test_a_backdoor_sends_its_own_model_times_its_share(tmp_path: Path) -> None:
    attack = Backdoor(target=9, fraction=0.5, weight=2.0, total_weight=10.0)
    np.testing.assert_array_equal(train_attacker(tmp_path, attack), 5 * weigh_labels(poison_dataset(attack, part(0))))


def test_an_impossible_strength_is_refused() -> None:
    with pytest.raises(ConfigError, match="strength is -1"):
        LabelShuffling(strength=-1)
    with pytest.raises(ConfigError, match="strength is inf"):
        LabelShuffling(strength=float("inf"))


def with_attack(attack: Attack | None) -> GatheredRun:
    base = experiment()
    return replace(base, devices=(*base.devices[:-1], replace(base.devices[-1], attack=attack)))


@pytest.mark.slow
@pytest.mark.export
def test_an_attack_changes_the_model(exports: ExportPool) -> None:
    honest, zero_strength = (run_batch(with_attack(attack), exports) for attack in (None, LabelShuffling(strength=0.0)))
    assert honest.model == zero_strength.model
    attacked = with_attack(Backdoor(target=3, total_weight=3.0))
    result = run_batch(attacked, exports)
    assert result.model != honest.model
    assert 0 <= compute_batch_figures(attacked, result)["backdoor"] <= 1
    assert "backdoor" not in compute_batch_figures(with_attack(None), honest)


def test_an_attack_changes_the_fingerprint_of_a_run() -> None:
    device = DeviceSettings(id="eve", log="laptop")
    attacks: tuple[Attack | None, ...] = (None, LabelShuffling(), LabelShuffling(seed=1), Backdoor())
    runs = [
        read_run("quickstart", ("min_clients=1",)),
        *(
            replace(
                read_run("quickstart", ("min_clients=1",)),
                fleet=FleetSettings(devices=(replace(device, attack=attack),)),
            )
            for attack in attacks
        ),
    ]
    assert len({run.fingerprint() for run in runs}) == 5
