"""Pictures of any kind, from a folder to a deployed model: each part of the system prepares them in the same way."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from emulation.batch_cases import LARGE_BYTES, client, config, experiment
from PIL import Image
from safetensors.torch import load

from subfleet.elastic.model_state import unpack_state
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun, gather_run
from subfleet.export.pool import ExportPool
from subfleet.export.programs import export_inference_model
from subfleet.export.requests import AnyRequest, InferRequest
from subfleet.protocol.errors import DataError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.readings import Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.transform import DataTransform
from subfleet.reporting.results import build_summary
from subfleet.settings.fleet import DeviceSettings, FleetSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataCheck, DataSettings
from subfleet.tasks import load_digits
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

pytestmark = [pytest.mark.slow, pytest.mark.export]

TRANSFORM = DataTransform(channels=1, resize=(9,), crop=(8, 8), mean=(0.3,), deviation=(0.35,))
TRAINERS: dict[str, Callable[..., Trainer]] = {"onnx": OnnxTrainer, "executorch": ExecutorchTrainer}


def write_pictures(folder: Path, first: int, count: int) -> Path:
    """Write digits of many sizes, modes and formats; some are rotated, with an EXIF tag for it."""
    dataset, generator = load_digits(), np.random.default_rng(first)
    for index in range(first, first + count):
        image = Image.fromarray((dataset.inputs[index, 0] * 255).astype(np.uint8))
        image = image.resize(cast("tuple[int, int]", tuple(generator.integers(9, 40, 2).tolist())))
        path = folder / str(int(dataset.labels[index])) / f"{index}.{('png', 'jpg', 'bmp')[index % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {}
        if path.suffix == ".jpg":
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": Image.Exif(), "quality": 95}
            options["exif"][0x0112] = 6
        elif path.suffix == ".png":
            image = image.convert(("RGBA", "LA", "P", "1")[index // 3 % 4])
        image.save(path, **options)
    for name in ("__MACOSX", "lost+found"):
        (folder / name).mkdir()
    return folder


class RecordingExports:
    """The exporter, which records the requests of inference models."""

    def __init__(self, inner: ExportPool) -> None:
        self.requests = list[InferRequest]()
        self._inner = inner

    def submit(self, request: AnyRequest, **options: Any) -> "Future[Path]":
        if isinstance(request, InferRequest):
            self.requests.append(request)
        return self._inner.submit(request, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return write_pictures(folder / "train", 0, 240), write_pictures(folder / "test", 300, 120)


@pytest.fixture(scope="module")
def run(pictures: tuple[Path, Path]) -> Run:
    device = DeviceSettings(id="board", steady=Reading(memory_free_bytes=LARGE_BYTES, downlink_bps=1e7), count=3)
    train, test = pictures
    return config(
        data=DataSettings(train=str(train), test=str(test), transform=TRANSFORM),
        fleet=FleetSettings(devices=(device,)),
        deploy_targets=("onnx",),
    )


@pytest.fixture(scope="module")
def finished_run(run: Run, exports: ExportPool) -> tuple[BatchResult, list[InferRequest]]:
    recorded = RecordingExports(exports)
    return run_batch(gather_run(run), cast("ExportPool", recorded)), recorded.requests


def test_a_fleet_trains_on_pictures_of_any_size_and_the_models_have_the_transform(
    finished_run: tuple[BatchResult, list[InferRequest]],
) -> None:
    result, requests = finished_run
    assert {row.status for record in result.rounds for row in record.clients} == {"aggregated"}
    assert not any(row.data_warning for record in result.rounds for row in record.clients)
    assert (result.rounds[-1].accuracy or 0) > 0.3
    assert [(request.transform, request.classes) for request in requests] == [(TRANSFORM, tuple("0123456789"))] * len(
        requests
    )
    assert requests


@pytest.mark.parametrize("target", sorted(TRAINERS))
def test_predictions_from_the_raw_pictures_are_those_of_the_servers_evaluation(
    tmp_path: Path,
    target: str,
    run: Run,
    pictures: tuple[Path, Path],
    finished_run: tuple[BatchResult, list[InferRequest]],
) -> None:
    result, _ = finished_run
    weights = unpack_state(load(result.model)).of("").shared
    request = InferRequest(
        model=run.model,
        architecture=Architecture(),
        target=target,
        weights_sha256="0" * 64,
        classes=tuple("0123456789"),
        transform=TRANSFORM,
    )
    trainer = TRAINERS[target]()
    path = tmp_path / f"model{trainer.suffix}"
    path.write_bytes(export_inference_model(request, weights)[0])
    predicted = trainer.predict(path, str(pictures[1]))
    assert predicted.accuracy == pytest.approx(result.rounds[-1].accuracy, abs=1e-9)
    assert len(predicted.labels) == 120
    # Without the transform in the model the pictures, which have many sizes, do not fit.
    path.write_bytes(export_inference_model(replace(request, transform=None), weights)[0])
    with pytest.raises(DataError, match=r"scale all images to one size, or set data\.transform"):
        trainer.predict(path, str(pictures[1]))


def test_samples_of_an_emulated_device_are_transformed_once(run: Run, pictures: tuple[Path, Path]) -> None:
    devices = gather_run(run).devices
    inputs = np.concatenate([device.data.inputs for device in devices])
    assert {device.data.transform for device in devices} == {TRANSFORM}
    assert inputs.shape == (240, 1, 8, 8)
    assert inputs.min() >= -0.3 / 0.35 - 1e-6
    assert inputs.max() <= 0.7 / 0.35 + 1e-6


def test_colour_pictures_are_made_gray_for_a_gray_model_and_errors_name_the_users_file(
    tmp_path: Path, run: Run
) -> None:
    for name in ("train", "test"):
        for label in range(10):
            (tmp_path / name / str(label)).mkdir(parents=True)
            Image.new("RGB", (8, 8), (label * 20, 9, 90)).save(tmp_path / name / str(label) / "1.png")
    plain = replace(run, data=DataSettings(train=str(tmp_path / "train"), test=str(tmp_path / "test")))
    assert {device.data.sample_shape for device in gather_run(plain).devices} == {(1, 8, 8)}
    (tmp_path / "train" / "3" / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1 image of '.*/train' cannot be used: '3/1\.png' cannot be read"):
        gather_run(plain)


def run_on_another_scale(check: DataCheck, exports: ExportPool) -> BatchResult:
    """Run three devices; the inputs of "cyd" are on a scale of 0 to 255."""
    base: GatheredRun = experiment(rounds=1)
    data = replace(base.run.data, check=check)
    changed = client("cyd", 2, LARGE_BYTES, LARGE_BYTES)
    changed = replace(changed, data=replace(changed.data, inputs=changed.data.inputs * np.float32(255)))
    devices = (*base.devices[:2], changed)
    return run_batch(replace(base, run=replace(base.run, data=data), devices=devices), exports)


def test_a_device_on_another_scale_stands_in_the_summary(exports: ExportPool) -> None:
    result = run_on_another_scale("warn", exports)
    warnings = build_summary("a", result.result)["data_warnings"]
    assert set(warnings) == {"cyd"}
    assert "a deviation 2" in warnings["cyd"]
    assert {row.status for row in result.rounds[0].clients} == {"aggregated"}


def test_a_device_on_another_scale_is_never_aggregated_where_the_run_refuses_it(exports: ExportPool) -> None:
    result = run_on_another_scale("refuse", exports)
    status = {row.client_id: row.status for row in result.rounds[0].clients}
    assert status["cyd"].startswith("skipped: its inputs range from 0 to 255 with")
    assert {status["ada"], status["bob"]} == {"aggregated"}


def test_data_on_the_same_scale_have_no_warning(exports: ExportPool) -> None:
    result = run_batch(experiment(rounds=1), exports, stop=threading.Event())
    assert build_summary("a", result.result)["data_warnings"] == {}
