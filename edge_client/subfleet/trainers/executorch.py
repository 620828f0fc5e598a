"""Trains and predicts with ExecuTorch. Its Python bindings need PyTorch; programs run in its own plain runtime."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import MissingExtraError, TrainingError
from subfleet.protocol.programs import DataSummary, Prediction, Program, TrainJob, TrainResult
from subfleet.tasks import read_dataset
from subfleet.trainers.kept import Slot
from subfleet.trainers.prediction import predict_dataset, read_model
from subfleet.trainers.training import RunProgram, run_training

__all__ = ["ExecutorchTrainer"]

Array = npt.NDArray[np.generic]
_METHOD = "forward"
# What PyTorch's allocator, which holds the outputs, says where the system gave no memory.
_NO_MEMORY = "can't allocate memory"


class ExecutorchTrainer:
    """The trainer of programs and models in the ExecuTorch format."""

    target: ClassVar[str] = "executorch"
    suffix: ClassVar[str] = ".pte"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self) -> None:
        self._slot = Slot()

    @property
    def held_bytes(self) -> int:
        """Memory that the session kept for the next job holds."""
        return self._slot.held_bytes

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `read_dataset` for what it raises.

        The runtime is loaded here too, so that the memory that is free from now on is what training can really have.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        _prepare(1)
        return read_dataset(data).summary()

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `run_training` for what it does and raises.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        _prepare(job.threads)
        return run_training(job, stopped, target=self.target, load=_load, slot=self._slot)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model with one input, float32 (batch, *sample shape), whose first output is the logits.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: ExecuTorch refuses the model.
        """
        _prepare(threads)
        import torch

        program = _load_program(read_model(model_path))
        meta = program.metadata(_METHOD)
        if meta.num_inputs() != 1 or len(meta.input_tensor_meta(0).sizes()) < 2:
            raise TrainingError(f"model {str(model_path)!r} must have one input of shape (batch, *sample shape)")
        batch_size, *sample_shape = meta.input_tensor_meta(0).sizes()

        def infer(samples: Array) -> Array:
            output: torch.Tensor = _guarded(lambda: program.load_method(_METHOD).execute([_tensor(samples)]))[0]
            return output.numpy()

        return predict_dataset(infer, read_dataset(data), sample_shape=tuple(sample_shape), batch_size=batch_size)


def _load(program: Program, threads: int) -> RunProgram:
    del threads  # set for the whole process before
    loaded = _load_program(bytes(program.body))
    inputs = [value.name for value in program.manifest.inputs]
    outputs = [value.name for value in program.manifest.outputs]

    def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
        tensors = [_tensor(values[name]) for name in inputs]
        results = _guarded(lambda: loaded.load_method(_METHOD).execute(tensors))
        return {name: result.numpy() for name, result in zip(outputs, results, strict=True)}

    return run


def _prepare(threads: int) -> None:
    """Import the runtime and set its threads for the whole process: PyTorch's pool and XNNPACK's."""
    try:
        import torch
        from executorch.extension.pybindings import portable_lib
    except ImportError as error:
        raise MissingExtraError("executorch", "export") from error
    torch.set_num_threads(threads)
    # Unsafe only while a program runs. XNNPACK otherwise takes every core; there is no public way to say so.
    portable_lib._unsafe_reset_threadpool(threads)  # noqa: SLF001 - as the line above says


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _load_program(body: bytes) -> Any:
    """Load a program and its method, which the program keeps.

    Only the program may be held on to: its method reads the program's memory but does not keep it alive.
    """
    from executorch.runtime import Runtime

    program = _guarded(lambda: Runtime.get().load_program(body))
    if _METHOD not in program.method_names:
        raise TrainingError(f"the ExecuTorch program has no method {_METHOD!r}; it must be exported again")
    _guarded(lambda: program.load_method(_METHOD))
    return program


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MemoryError:
        raise
    # The bindings raise RuntimeError for most failures, and others where arguments do not fit.
    except Exception as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"ExecuTorch refused the program ({reason:.300}); it must be exported again") from error
