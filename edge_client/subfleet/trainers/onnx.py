"""Trains and predicts with stock ONNX Runtime on the CPU. Needs no PyTorch and no `onnx`."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import MissingExtraError, TrainingError
from subfleet.protocol.programs import DataSummary, Prediction, Program, TrainJob, TrainResult
from subfleet.tasks import read_dataset
from subfleet.trainers.prediction import FREE_BATCH_SIZE, predict_dataset, read_model
from subfleet.trainers.training import RunProgram, run_training

__all__ = ["OnnxTrainer"]

Array = npt.NDArray[np.generic]
_ERRORS_ONLY = 3
# What its exceptions say where the system gave no memory; none of them is a MemoryError.
_NO_MEMORY = ("Failed to allocate memory", "std::bad_alloc")
# The smallest model there is: one Identity from "x" to "y", float32 of shape (1,), opset 13, IR version 8.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01wZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
# Weights in files beside a model are read from this folder: there is none, so that no model can name a local file.
_NO_FOLDER = "/nonexistent"


class OnnxTrainer:
    """The trainer of programs and models in the ONNX format."""

    target: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `read_dataset` for what it raises.

        The runtime is loaded here too, so that the memory that is free from now on is what training can really have.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
        """
        _runtime()
        return read_dataset(data).summary()

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `run_training` for what it does and raises.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        runtime = _runtime()
        return run_training(job, stopped, target=self.target, load=partial(_load, runtime))

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model with one input, float32 (batch, *sample shape), whose first output is the logits.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: ONNX Runtime refuses the model.
        """
        session = _session(_runtime(), read_model(model_path), threads)
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) < 2:
            raise TrainingError(f"model {str(model_path)!r} must have one input of shape (batch, *sample shape)")
        name = inputs[0].name
        batch, *sample_shape = inputs[0].shape
        output = session.get_outputs()[0].name

        def infer(samples: npt.NDArray[np.float32]) -> Array:
            return np.asarray(_guarded(lambda: session.run([output], {name: samples}))[0])

        return predict_dataset(
            infer,
            read_dataset(data),
            sample_shape=tuple(sample_shape),
            batch_size=batch if isinstance(batch, int) else FREE_BATCH_SIZE,
        )


def _load(runtime: ModuleType, program: Program, threads: int) -> RunProgram:
    session = _session(runtime, program.body, threads)
    names = [value.name for value in program.manifest.outputs]

    def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
        feed = {name: np.ascontiguousarray(array) for name, array in values.items()}
        return dict(zip(names, _guarded(lambda: session.run(names, feed)), strict=True))

    return run


def _runtime() -> ModuleType:
    """Import ONNX Runtime and make it load what it loads only once, so that no single training is charged with it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "edge") from error
    _session(onnxruntime, _IDENTITY, 1).run(None, {"x": np.zeros(1, np.float32)})
    module: ModuleType = onnxruntime
    return module


def _session(runtime: ModuleType, model: bytes | memoryview, threads: int) -> Any:
    """One session for one task, so that its memory can be measured and is given back with it."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # The arena belongs to the session and goes with it; it fits freed blocks tightly, where planned patterns set memory
    # aside for a whole run. Measured on two residual blocks: 26 MB; with patterns 46 MB; without the arena 34 to 58 MB.
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    # Threads that wait for work by spinning drain batteries.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    return _guarded(lambda: runtime.InferenceSession(bytes(model), options, providers=["CPUExecutionProvider"]))


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MemoryError:
        raise
    # ONNX Runtime's exceptions have no common base but Exception.
    except Exception as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"ONNX Runtime refused the program ({reason:.300}); it must be exported again") from error
