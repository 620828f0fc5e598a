"""Very unequal honest fleets: no update is scaled down, and detection changes no result."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from emulation.batch_cases import LARGE_BYTES, client, config, log
from matrices import mostly_long

from subfleet.arrays import decode_arrays
from subfleet.emulation.batch.host import run_in_batch
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.batch.trainers import create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.emulation.partitions import partition
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.totals import describe_outliers
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.reading import read_run
from subfleet.settings.samples import PartitionSettings
from subfleet.settings.sections import OutlierSettings
from subfleet.tasks import Dataset, load_digits
from subfleet.trainers.job_files import write_change

pytestmark = pytest.mark.slow

TRAINING_COUNT = 1400
"""The number of digits for training; models are evaluated on the others."""
COUNTS = (5000, 1200, 300, 40, 8, 8, 8, 8)


def samples(count: int, seed: int) -> Dataset:
    """Digits drawn with replacement, each with its own noise."""
    dataset = load_digits().take(np.random.default_rng(seed).integers(0, TRAINING_COUNT, count))
    noise = np.random.default_rng(seed + 1).normal(0, 0.05 * dataset.inputs.max(), dataset.inputs.shape)
    return replace(dataset, inputs=np.clip(dataset.inputs + noise, 0, None).astype(np.float32))


def fleet(parts: Sequence[Dataset]) -> tuple[EmulatedDevice, ...]:
    """A device for each part; they run the training step from which programs are exported."""
    template = client("any", 0, LARGE_BYTES, runtime="torch")
    return tuple(
        replace(template, client_id=f"client-{index}", data=data, log=log([LARGE_BYTES + data.summary().data_bytes]))
        for index, data in enumerate(parts)
    )


def split(name: Literal["iid", "dirichlet"], alpha: float) -> tuple[Dataset, ...]:
    dataset, settings = samples(TRAINING_COUNT, 7), PartitionSettings(name=name, alpha=alpha, min_samples=2)
    return tuple(dataset.take(indices) for indices in partition(dataset, settings, clients=10, seed=1))


def play_run(
    devices: tuple[EmulatedDevice, ...], exports: ExportPool, outliers: Any, trainers: Any = None, **changes: Any
) -> BatchResult:
    training = TrainingSettings(batch_size=16, learning_rate=0.1)
    settings = {"targets": ("torch",), "min_clients": len(devices), "rounds": 2, "training": training, **changes}
    run = config(outliers=OutlierSettings(outliers=outliers), **settings)
    evaluation = load_digits().take(np.arange(TRAINING_COUNT, len(load_digits())))
    return run_batch(GatheredRun(run=run, devices=devices, evaluation=evaluation), exports, trainers=trainers)


def list_outliers(result: BatchResult) -> tuple[str, ...]:
    return describe_outliers(result.rounds)


@pytest.mark.parametrize("method", mostly_long([HeteroFL(), FedAvg()], HeteroFL()), ids=lambda method: method.TYPE)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: split("iid", 1.0), marks=pytest.mark.long),
        lambda: split("dirichlet", 0.05),
        pytest.param(lambda: [samples(n, i) for i, n in enumerate(COUNTS)], marks=pytest.mark.long),
    ],
    ids=["iid", "dirichlet-0.05", "8-to-5000"],
)
def test_no_honest_device_is_scaled_in_very_unequal_fleets(method: AnyMethod, parts: Any, exports: ExportPool) -> None:
    assert list_outliers(play_run(fleet(parts()), exports, "scale", method=method)) == ()


def test_a_device_of_1200_samples_among_five_of_8_is_not_scaled(exports: ExportPool) -> None:
    devices = fleet([samples(1200, 0), *(samples(8, seed) for seed in range(1, 6))])
    scaled, off = (play_run(devices, exports, outliers, rounds=2) for outliers in ("scale", "off"))
    assert scaled.model == off.model
    assert list_outliers(scaled) == ()
    assert (scaled.rounds[-1].accuracy or 0) > 0.8


class ExaggeratingTrainer:
    """A trainer that multiplies its changes by 10,000, on a device without a configured attack."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def train(self, job: Any, stopped: Any) -> TrainResult:
        result: TrainResult = self._inner.train(job, stopped)
        arrays = decode_arrays(job.output_path.read_bytes())
        write_change(job, {name: (1e4 * np.asarray(array)).astype(np.float32) for name, array in arrays.items()})
        return result


def test_in_an_emulated_fleet_without_attackers_outliers_are_only_reported_by_default(
    exports: ExportPool,
) -> None:
    devices = fleet([samples(20, seed) for seed in range(5)])
    trainers: Mapping[str, Any] = {"client-4": ExaggeratingTrainer(create_trainers({"torch"})["torch"])}
    auto, off, scaled = (
        play_run(devices, exports, outliers, trainers, rounds=1) for outliers in ("auto", "off", "scale")
    )
    assert auto.model == off.model != scaled.model
    assert list_outliers(auto) == ("updates far from the others, which counted in full: client-4 in 1 (of 1 rounds)",)
    assert "client-4" not in auto.result.method_status
    assert list_outliers(scaled) == ("updates scaled down: client-4 in 1 (of 1 rounds)",)
    assert scaled.result.method_status.endswith("updates scaled down: client-4 in 1 (of 1 rounds)")


@pytest.mark.long
@pytest.mark.export
@pytest.mark.parametrize("alpha", [100.0, 0.05])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_has_outliers_in_an_honest_fleet(
    name: str, alpha: float, exports: ExportPool, tmp_path: Path
) -> None:
    run = read_run(
        name,
        (
            "rounds=2",
            "training.epochs=2",
            "deploy_targets=[]",
            f"data.partition.alpha={alpha}",
            "data.partition.min_samples=10",
            "outliers.outliers=scale",
        ),
    )
    run_in_batch(run, tmp_path, Unobserved(), threading.Event(), exports=exports)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["outliers"] == {"scaled": {}, "left_out": {}, "reported": {}}
