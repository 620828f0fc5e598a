import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from subfleet.arrays import decode_arrays
from subfleet.protocol.errors import DataError, FileError, LoadError, MemoryLimitError, MissingExtraError, TrainingError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset, write_npz
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

pytest.importorskip("executorch")
torch = pytest.importorskip("torch")
from trainers.hidden_binding import NO_BINDING, hide_binding  # noqa: E402
from trainers.softmax_program import BATCH, CLASSES, FEATURES, SHAPE, manifest, samples, weights, write_job  # noqa: E402
from trainers.softmax_pte import pte_program, write_pte_model  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]
SETTINGS = TrainingSettings(epochs=3, batch_size=BATCH, learning_rate=0.1, seed=5)


@pytest.fixture(params=["native", "bindings"], autouse=True)
def runtime(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "bindings":
        hide_binding(tmp_path, monkeypatch)
    else:
        pytest.importorskip("subfleet_executorch", reason=NO_BINDING)


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def packed() -> bytes:
    return encode_program(pte_program())


@pytest.fixture
def job(tmp_path: Path, packed: bytes) -> Job[Train]:
    job = write_job(tmp_path, samples(BATCH * 3 + 1), settings=SETTINGS)
    (tmp_path / "program.pte").write_bytes(packed)
    return replace(job, program_path=tmp_path / "program.pte")


def test_both_runtimes_train_alike(job: Job[Train]) -> None:
    other = replace(
        job, program_path=job.program_path.with_name("program"), output_path=job.output_path.with_name("onnx")
    )
    onnx_result = OnnxTrainer().train(other, never)
    result = ExecutorchTrainer().train(job, never)
    expected = decode_arrays(other.output_path.read_bytes())
    actual = decode_arrays(job.output_path.read_bytes())
    assert set(actual) == set(expected)
    for name, array in expected.items():
        difference = np.asarray(actual[name], np.float64) - np.asarray(array, np.float64)
        assert np.abs(difference).max() < 2e-6
    assert result.loss == pytest.approx(onnx_result.loss, abs=1e-6)
    assert result.accuracy == onnx_result.accuracy
    assert result.step_count == onnx_result.step_count == 12


def test_learning_rate_0_gives_a_change_of_exact_zeros(job: Job[Train]) -> None:
    ExecutorchTrainer().train(
        replace(job, work=replace(job.work, settings=replace(SETTINGS, learning_rate=0.0))), never
    )
    for array in decode_arrays(job.output_path.read_bytes()).values():
        assert not array.any()


def test_training_a_round_twice_gives_the_same_bytes(job: Job[Train]) -> None:
    ExecutorchTrainer().train(job, never)
    first = job.output_path.read_bytes()
    ExecutorchTrainer().train(job, never)
    assert job.output_path.read_bytes() == first


def test_stopping_and_the_memory_limit_end_training(job: Job[Train]) -> None:
    answers = iter([False, True])
    with pytest.raises(TrainingError, match="stopped after 1 steps"):
        ExecutorchTrainer().train(job, lambda: next(answers))
    with pytest.raises(MemoryLimitError):
        ExecutorchTrainer().train(replace(job, memory_limit_bytes=0), never)
    assert not job.output_path.exists()


def test_a_body_that_is_no_program_is_refused(job: Job[Train]) -> None:
    broken = Program(manifest=manifest("executorch"), body=b"no program" * 100)
    job.program_path.write_bytes(encode_program(broken))
    with pytest.raises(LoadError, match=r"ExecuTorch .*refused"):
        ExecutorchTrainer().train(job, never)


def test_predictions_equal_a_reference_with_a_padded_last_batch(tmp_path: Path) -> None:
    weight = np.asarray(weights()["head.weight"], np.float32)
    dataset = samples(17)
    write_npz(tmp_path / "data.npz", dataset)
    write_pte_model(tmp_path / "model.pte", torch.from_numpy(weight.copy()), 7)
    prediction = ExecutorchTrainer().predict(tmp_path / "model.pte", str(tmp_path / "data.npz"))
    expected = (dataset.inputs.reshape(-1, FEATURES) @ weight).argmax(1)
    assert prediction.labels == tuple(expected)
    assert weight.shape == (FEATURES, CLASSES)
    assert prediction.accuracy == pytest.approx(np.mean(expected == dataset.labels))

    other = Dataset(inputs=np.zeros((2, *SHAPE[::-1]), np.float32), labels=np.zeros(2, np.int64))
    write_npz(tmp_path / "data.npz", other)
    with pytest.raises(DataError, match="but the model takes"):
        ExecutorchTrainer().predict(tmp_path / "model.pte", str(tmp_path / "data.npz"))
    with pytest.raises(FileError):
        ExecutorchTrainer().predict(tmp_path / "missing.pte", str(tmp_path / "data.npz"))


def test_without_the_package_the_binding_for_devices_is_named(job: Job[Train], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "subfleet_executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.extension.pybindings", None)
    monkeypatch.delitem(sys.modules, "subfleet.trainers.executorch_bindings", raising=False)
    for library in ("_C", "portable_lib"):
        monkeypatch.delitem(sys.modules, f"executorch.extension.pybindings.{library}", raising=False)
    with pytest.raises(MissingExtraError, match="install the wheel of subfleet-executorch"):
        ExecutorchTrainer().describe(job.data)
