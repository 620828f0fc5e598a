"""ONNX Runtime as installed on a device: absent, without a provider, without PyTorch, or old."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from export.oldest import OLDEST, needs_oldest
from trainers.softmax_program import BATCH, samples, write_job

from subfleet.arrays import decode_arrays
from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.training import TrainingSettings
from subfleet.trainers.onnx import OnnxTrainer

SETTINGS = TrainingSettings(epochs=3, batch_size=BATCH, learning_rate=0.1, seed=5)


def never() -> bool:
    return False


@pytest.mark.parametrize("listed", [False, True])
def test_a_provider_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, listed: bool
) -> None:
    """If the libraries of a provider are missing, the runtime continues without it; Subfleet does not."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    if listed:
        original = onnxruntime.InferenceSession
        both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
        monkeypatch.setattr(
            onnxruntime,
            "InferenceSession",
            lambda model, options, providers: original(model, options, providers=providers and both[1:]),
        )
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    trainer = OnnxTrainer("cuda")
    for use_provider in (lambda: trainer.describe(job.data), lambda: trainer.train(job, never)):
        with pytest.raises(ConfigError, match=r"needs CUDAExecutionProvider, but ONNX Runtime .*CPUExecutionProvider"):
            use_provider()


def test_without_the_runtime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"'onnxruntime' is not installed; run: pip install 'subfleet\[edge\]'"):
        OnnxTrainer().train(job, never)


WITHOUT_TORCH = """
import sys
from pathlib import Path
for name in ("torch", "executorch", "onnx", "safetensors"):
    sys.modules[name] = None

from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.trainers.onnx import OnnxTrainer
folder = Path(sys.argv[1])
job = Job(
    program_path=folder / "program", weights_path=folder / "weights", output_path=folder / "blocked",
    data=str(folder / "data.npz"),
    work=Train(settings=TrainingSettings(epochs=3, batch_size=8, learning_rate=0.1, seed=5)),
    round=3, client_id="device-1", memory_limit_bytes=2**30,
)
assert OnnxTrainer().train(job, lambda: False).step_count == 9
"""


@pytest.mark.slow
def test_a_process_without_torch_trains_the_same_bits(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(20), settings=SETTINGS)
    OnnxTrainer().train(job, never)
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "blocked").read_bytes() == job.output_path.read_bytes()


@pytest.mark.slow
@needs_oldest
def test_the_oldest_runtime_trains_as_the_newest(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(20), settings=SETTINGS)
    OnnxTrainer().train(job, never)
    code = WITHOUT_TORCH + "import onnxruntime; assert onnxruntime.__version__ == '1.23.2'\n"
    environment = {**os.environ, "PYTHONPATH": str(OLDEST)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, env=environment)
    newest = decode_arrays(job.output_path.read_bytes())
    for name, array in decode_arrays((tmp_path / "blocked").read_bytes()).items():
        assert np.abs(np.asarray(array, np.float64) - np.asarray(newest[name], np.float64)).max() < 1e-6
