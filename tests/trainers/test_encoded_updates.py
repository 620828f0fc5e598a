"""Trainers write their update with the codec of the job."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from trainers.softmax_program import BATCH, samples, write_job

from subfleet.arrays import decode_arrays
from subfleet.arrays.codecs import count_encoded_bytes, decode_change, draw_rounding_numbers, encode_changes
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec, Qsgd, TopK, TopKQsgd, Uncompressed
from subfleet.trainers.job_files import write_change
from subfleet.trainers.onnx import OnnxTrainer

SETTINGS = TrainingSettings(epochs=2, batch_size=BATCH, learning_rate=0.1, seed=5)
SHAPES = {"head.weight": (6, 4), "head.bias": (4,)}
CODECS = (Uncompressed(), Qsgd(levels=7), TopK(fraction=0.5), TopKQsgd(fraction=0.5, levels=7))


def train_bytes(job: Job[Train]) -> bytes:
    OnnxTrainer().train(job, lambda: False)
    return job.output_path.read_bytes()


def decode(codec: AnyUpdateCodec, content: bytes) -> dict[str, npt.NDArray[np.float32]]:
    arrays = decode_arrays(content)
    return {name: decode_change(codec, name, arrays[name], shape, exact=False) for name, shape in SHAPES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.TYPE)
def test_a_device_sends_its_encoded_change(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    job = write_job(tmp_path, samples(40), settings=SETTINGS)
    change = decode_arrays(train_bytes(job))
    written = train_bytes(replace(job, work=replace(job.work, update_codec=codec)))
    expected = encode_changes(
        codec,
        change,
        exact=(),
        uniform=lambda name: draw_rounding_numbers(name, seed=5, round_number=job.round, client_id=job.client_id),
    )
    arrays = decode_arrays(written)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
    assert arrays["head.weight"].nbytes == count_encoded_bytes(codec, 24)
    assert train_bytes(replace(job, work=replace(job.work, update_codec=codec))) == written, (
        "a repeated training sends the same bytes"
    )


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.TYPE)
def test_learning_rate_0_sends_no_change(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    settings = replace(SETTINGS, learning_rate=0.0)
    job = replace(
        write_job(tmp_path, samples(20), settings=settings),
        work=replace(write_job(tmp_path, samples(20), settings=settings).work, update_codec=codec),
    )
    for name, array in decode(codec, train_bytes(job)).items():
        assert array.tobytes() == np.zeros(SHAPES[name], np.float32).tobytes()


def test_rounding_differs_between_rounds_and_clients(tmp_path: Path) -> None:
    job = replace(
        write_job(tmp_path, samples(20), settings=SETTINGS),
        work=replace(write_job(tmp_path, samples(20), settings=SETTINGS).work, update_codec=Qsgd(levels=2)),
    )
    change = {"head.weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)}
    updates = set()
    for variant in (job, replace(job, round=4), replace(job, client_id="device-2")):
        write_change(variant, change)
        updates.add(job.output_path.read_bytes())
    assert len(updates) == 3


def test_running_statistics_are_sent_uncompressed(tmp_path: Path) -> None:
    job = replace(
        write_job(tmp_path, samples(20), settings=SETTINGS),
        work=replace(write_job(tmp_path, samples(20), settings=SETTINGS).work, update_codec=TopKQsgd()),
    )
    change = {name: np.linspace(-1, 1, 64, dtype=np.float32) for name in ("norm.running_mean", "weight")}
    write_change(job, change, exact={"norm.running_mean"})
    arrays = decode_arrays(job.output_path.read_bytes())
    np.testing.assert_array_equal(arrays["norm.running_mean"], change["norm.running_mean"])
    assert arrays["weight"].dtype == np.uint8
