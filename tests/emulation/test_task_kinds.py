"""An included run of each kind of task is played on every runtime, and checked with scikit-learn."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from matrices import mostly_long
from safetensors.torch import load

from subfleet.cli.preflight import export_submodels
from subfleet.elastic.building import network_of
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import unpack_state
from subfleet.emulation.batch.figures import compute_batch_figures
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun, gather_run
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.export.programs import export_inference_model
from subfleet.export.requests import InferRequest
from subfleet.journal.evaluations import describe_spread
from subfleet.protocol.jobs import Prediction
from subfleet.reporting.report import render_report
from subfleet.reporting.results import build_summary
from subfleet.reporting.texts import describe_result
from subfleet.settings.reading import read_run
from subfleet.tasks import Dataset, write_npz
from subfleet.tasks.dataset import Labels
from subfleet.tasks.named_dataset import DATASETS
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

pytestmark = [pytest.mark.slow, pytest.mark.export]

GOOD: Mapping[str, Mapping[str, float]] = {
    "classification": {"accuracy": 0.85, "macro_f1": 0.85, "auroc": 0.97},
    "sequence": {"accuracy": 0.42},
    "segmentation": {"mean_iou": 0.55, "accuracy": 0.9},
    "multi-label": {"macro_f1": 0.8, "auroc": 0.9, "accuracy": 0.85},
    "regression": {"r2": 0.2},
    "regression-several": {"r2": 0.4},
}
"""The metrics that each run must exceed."""
TRAINERS = {"onnx": OnnxTrainer, "executorch": ExecutorchTrainer}


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run."""

    name: str
    gathered: GatheredRun
    result: BatchResult


@pytest.fixture(
    scope="module", params=mostly_long(GOOD, "sequence", "segmentation", "multi-label", "regression-several")
)
def finished_run(request: pytest.FixtureRequest, exports: ExportPool) -> FinishedRun:
    gathered = gather_run(read_run(request.param, ("deploy_targets=[]",)))
    return FinishedRun(name=request.param, gathered=gathered, result=run_batch(gathered, exports))


def test_it_ends_with_the_metrics_of_its_kind_and_shows_them(finished_run: FinishedRun) -> None:
    kind = finished_run.gathered.run.training.objective.kind
    last = finished_run.result.rounds[-1]
    assert [row.status for record in finished_run.result.rounds for row in record.clients] == ["aggregated"] * 9
    assert (last.headline, next(iter(last.all_metrics))) == (kind.headline, kind.headline)
    assert set(last.all_metrics) == set(kind.metrics)
    assert (last.accuracy is None) == ("accuracy" not in kind.metrics)
    for name, minimum in GOOD[finished_run.name].items():
        assert last.all_metrics[name] > minimum, name
    summary = build_summary(finished_run.name, finished_run.result.result)
    assert (summary["headline"], summary["metrics"]) == (kind.headline, last.all_metrics)
    assert summary["evaluation"][kind.headline]["clients"] == 3
    json.dumps(summary, allow_nan=False)
    assert f"{last.value:.4g}"[:5] in describe_result(finished_run.result.result)
    page = render_report(finished_run.name, finished_run.result.result, {})
    assert all(words in page for words in (last.quality, "of the full model", "Evaluation by devices"))
    run_figures = compute_batch_figures(finished_run.gathered, finished_run.result)
    assert set(run_figures["own"]) == {"laptop", "phone", "pi-4"}
    worst = max if kind.headline in ("rmse", "perplexity") else min
    assert run_figures["own_worst"] == worst(run_figures["own"].values())
    assert run_figures["worst_tier"] == worst(run_figures["tiers"].values())


def test_evaluations_by_devices_agree_with_the_server_on_the_same_samples(finished_run: FinishedRun) -> None:
    run, result = finished_run.gathered.run, finished_run.result
    network, state = network_of(run.model), unpack_state(load(result.model)).shared
    objective = run.training.objective
    (record,) = result.result.evaluations
    held_out = {device.client_id: device.test for device in finished_run.gathered.devices}
    totals = []
    for row in record.evaluated:
        data, owner = held_out[row.client_id], result.own[row.client_id]
        assert data is not None
        evaluation = evaluate(network, owner.architecture, state, *tensors(data), objective=objective.name)
        reported = {**({} if row.accuracy is None else {"accuracy": row.accuracy}), **row.metrics}
        assert reported == pytest.approx(dict(evaluation.metrics), abs=2e-4), row.client_id
        assert row.loss == pytest.approx(evaluation.loss, rel=1e-4)
        totals.append(evaluation.totals)
    assert len(totals) == 3
    pooled = Dataset(
        inputs=np.concatenate([samples.inputs for samples in held_out.values() if samples is not None]),
        labels=np.concatenate([samples.labels for samples in held_out.values() if samples is not None]),
    )
    if (
        len({submodel.architecture for submodel in result.own.values()}) == 1
    ):  # they have the same model, which is evaluated on all samples together
        architecture = next(iter(result.own.values())).architecture
        together = evaluate(network, architecture, state, *tensors(pooled), objective=objective.name)
        assert dict(record.together) == pytest.approx(dict(together.metrics), abs=2e-4)
    assert "on held-out samples of their own" in describe_spread(record)


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_metrics_of_the_exported_model_agree_with_scikit_learn_and_the_server(
    finished_run: FinishedRun, target: str, tmp_path: Path
) -> None:
    run = finished_run.gathered.run
    network, state = network_of(run.model), unpack_state(load(finished_run.result.model)).shared
    request = InferRequest(
        model=run.model,
        architecture=network.full_architecture(),
        target=target,
        weights_sha256="",
        classes=finished_run.gathered.evaluation.class_names,
        objective=run.training.objective.name,
    )
    body, difference = export_inference_model(request, extract(network, network.full_architecture(), state))
    suffix = {"onnx": ".onnx", "executorch": ".pte"}[target]
    (tmp_path / f"model{suffix}").write_bytes(body)
    write_npz(tmp_path / "test.npz", finished_run.gathered.evaluation)
    prediction = TRAINERS[target]().predict(tmp_path / f"model{suffix}", str(tmp_path / "test.npz"))
    assert difference < 1e-4
    server = finished_run.result.rounds[-1].all_metrics
    assert prediction.headline == run.training.objective.kind.headline
    assert dict(prediction.metrics) == pytest.approx(server, abs=2e-4)
    expected = compute_with_scikit_learn(prediction, finished_run.gathered.evaluation)
    assert expected, "scikit-learn has metrics of each kind"
    assert {name: server[name] for name in expected} == pytest.approx(expected, abs=2e-4)


def compute_with_scikit_learn(prediction: Prediction, data: Dataset) -> dict[str, float]:
    """The metrics that need no scores, computed by scikit-learn."""
    from sklearn import metrics as sk

    labels = data.labels
    if prediction.numbers:
        numbers = np.asarray(prediction.numbers).reshape(labels.shape)
        return {
            "rmse": sk.root_mean_squared_error(labels, numbers),
            "mae": sk.mean_absolute_error(labels, numbers),
            "r2": sk.r2_score(labels, numbers),
        }
    predicted = np.asarray(prediction.labels).reshape(labels.shape)
    if labels.dtype == np.float32:
        return {
            "macro_f1": sk.f1_score(labels, predicted, average="macro"),
            "accuracy": 1 - sk.hamming_loss(labels, predicted),
        }
    return compute_class_metrics(prediction, labels.ravel().astype(np.int64), predicted.ravel())


def compute_class_metrics(
    prediction: Prediction, labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]
) -> dict[str, float]:
    from sklearn import metrics as sk

    known = {
        "accuracy": sk.accuracy_score(labels, predicted),
        "macro_f1": sk.f1_score(labels, predicted, average="macro"),
        "mean_iou": sk.jaccard_score(labels, predicted, average="macro"),
    }
    return {name: value for name, value in known.items() if name in prediction.metrics}


def tensors(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(data.inputs.copy()), torch.from_numpy(data.labels.copy())


def write_user_files(name: str, folder: Path, labels: Callable[[Labels], npt.NDArray[Any]]) -> tuple[str, ...]:
    """Write samples of a known data set as user files; the settings of a short run on them."""
    parts = DATASETS.load(name).load()
    for part, data in (("train", parts.train.take(np.arange(300))), ("test", parts.test.take(np.arange(80)))):
        np.savez(folder / f"{part}.npz", x=data.inputs, y=labels(data.labels))
    files = (f"data.{part}={folder / part}.npz" for part in ("train", "test"))
    return ("data.name=", *files, "rounds=1", "deploy_targets=[]")


USER_LABELS: Mapping[str, tuple[str, type]] = {
    "one number, flat": ("regression", np.float64),
    "one whole number, flat": ("regression", np.int32),
    "several labels, whole": ("multi-label", np.uint8),
    "pixels of a byte": ("segmentation", np.uint8),
    "classes of a byte": ("classification", np.uint8),
}
"""An included run, and the type of the labels in a user file."""


@pytest.mark.parametrize("kind", USER_LABELS)
def test_labels_of_user_files_may_have_any_type(kind: str, exports: ExportPool, tmp_path: Path) -> None:
    """From the partition to the figures at the end of the run."""
    name, labels = USER_LABELS[kind]
    settings = write_user_files(
        read_run(name).data.name,
        tmp_path,
        lambda values: np.round(values[:, 0] if values.shape[1:] == (1,) else values).astype(labels),
    )
    gathered = gather_run(read_run(name, (*settings, "data.partition.min_samples=20")))
    result = run_batch(gathered, exports)
    assert [row.status for row in result.rounds[0].clients] == ["aggregated"] * 3
    assert len(compute_batch_figures(gathered, result)["own"]) == 3


def test_binary_labels_are_partitioned_like_classes(exports: ExportPool, tmp_path: Path) -> None:
    """A model with one binary output."""
    settings = write_user_files("digits", tmp_path, lambda labels: labels % 2)
    objective = ("training.objective.name=binary_cross_entropy", "model.input_shape=[64]", "data.partition.alpha=0.1")
    gathered = gather_run(read_run("regression", (*settings, *objective)))
    shares = [float(device.data.labels.mean()) for device in gathered.devices]
    assert max(shares) - min(shares) > 0.3
    result = run_batch(gathered, exports)
    assert {"accuracy", "auroc", "macro_f1"} == set(result.rounds[0].all_metrics)
    assert result.rounds[0].all_metrics["auroc"] > 0.6
    assert len(compute_batch_figures(gathered, result)["own"]) == 3


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(GOOD))
def test_preflight_accepts_every_kind_of_task(name: str, cache: CacheFolder) -> None:
    verdicts = [*export_submodels(read_run(name), cache)]
    assert {verdict.target for verdict in verdicts} == {"onnx", "executorch", "torch"}
    assert [verdict.problem for verdict in verdicts] == [""] * len(verdicts)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fjord", "dynamic_selection"])
@pytest.mark.parametrize("name", ["segmentation", "sequence"])
def test_submodels_are_distilled_for_every_kind_with_classes(name: str, method: str, exports: ExportPool) -> None:
    """FjORD distils into nested widths from the larger one; dynamic selection from the whole model on noise."""
    run = read_run(name, (f"method={{type='{method}'}}", "rounds=1", "deploy_targets=[]", "data.samples=300"))
    result = run_batch(gather_run(run), exports)
    assert [row.status for row in result.rounds[0].clients] == ["aggregated"] * 3
    assert result.rounds[0].value is not None
