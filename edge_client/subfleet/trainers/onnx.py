"""Trains and predicts with stock ONNX Runtime on the CPU. Needs no PyTorch and no `onnx`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import MissingExtraError, TrainingError
from subfleet.protocol.programs import DataSummary, Prediction, Program, TrainJob, TrainResult
from subfleet.tasks import read_dataset
from subfleet.trainers.prediction import FREE_BATCH_SIZE, predict_dataset, read_model
from subfleet.trainers.training import run_training

__all__ = ["OnnxTrainer"]

Array = npt.NDArray[np.generic]
_ERRORS_ONLY = 3
# Weights in files beside a model are read from this folder: there is none, so that no model can name a local file.
_NO_FOLDER = "/nonexistent"


class OnnxTrainer:
    """The trainer of programs and models in the ONNX format."""

    target: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `read_dataset` for what it raises."""
        return read_dataset(data).summary()

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `run_training` for what it does and raises.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
        """
        # Imported before anything is measured: the library is there whatever subnet is trained.
        runtime = _runtime()

        def load(program: Program, threads: int) -> "_OnnxProgram":
            return _OnnxProgram(runtime, program, threads)

        return run_training(job, stopped, target=self.target, load=load)

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


class _OnnxProgram:
    """A session whose inputs and outputs are OrtValues: weights never leave the runtime between steps."""

    def __init__(self, runtime: ModuleType, program: Program, threads: int) -> None:
        self._runtime = runtime
        self._session = _session(runtime, program.body, threads)
        self._outputs = [value.name for value in program.manifest.outputs]

    def wrap(self, array: Array) -> Any:
        """An OrtValue that shares the array's memory."""
        return self._runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def unwrap(self, value: Any) -> Array:
        """An OrtValue's array."""
        return np.asarray(value.numpy())

    def run(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """One step."""
        results: Sequence[Any] = _guarded(lambda: self._session.run_with_ort_values(self._outputs, values))
        return dict(zip(self._outputs, results, strict=True))


def _runtime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "edge") from error
    module: ModuleType = onnxruntime
    return module


def _session(runtime: ModuleType, model: bytes | memoryview, threads: int) -> Any:
    """One session for one task, so that its memory can be measured and is given back with it."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # The arena takes memory in growing steps and keeps it: the peak would be its, not the program's.
    options.enable_cpu_mem_arena = False
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
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"ONNX Runtime refused the program ({reason:.300}); it must be exported again") from error
