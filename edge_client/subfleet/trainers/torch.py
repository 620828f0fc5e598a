"""Trains and predicts with PyTorch itself, on the CPU or a CUDA device, where it is installed anyway.

It runs the very step that the programs of other targets are traced from, so it is also what they are compared with.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from subfleet.protocol.errors import (
    ConfigError,
    ExportError,
    MissingExtraError,
    ProtocolError,
    SubfleetError,
    TrainingError,
)
from subfleet.protocol.programs import (
    DataSummary,
    EvaluateJob,
    EvaluationResult,
    Prediction,
    Program,
    ScoreJob,
    TrainJob,
    TrainResult,
)
from subfleet.tasks import describe_source
from subfleet.trainers.evaluating import evaluate_job
from subfleet.trainers.kept import Host, Slot
from subfleet.trainers.prediction import FREE_BATCH_SIZE, model_data, predict_dataset, read_model
from subfleet.trainers.scoring import score_job
from subfleet.trainers.sessions import Array, SessionLayout, StepSession, zeros
from subfleet.trainers.training import train_job

if TYPE_CHECKING:
    import torch

    from subfleet.export.steps import Step

__all__ = ["TorchTrainer"]

# This trainer is for machines that have PyTorch anyway; a device is sent to what it can run without.
_REMEDY = "use ONNX Runtime, which devices have: --runtime onnx for training, and .onnx models"
# What PyTorch's CPU allocator says where the system gave no memory; it raises no MemoryError.
_NO_MEMORY = ("can't allocate memory", "out of memory")


class TorchTrainer:
    """The trainer of programs and models for PyTorch.

    Args:
        provider: the device that computes: "cpu" or "cuda".
        host: the process that it trains in; without one, a device's own.
    """

    target: ClassVar[str] = "torch"
    suffix: ClassVar[str] = ".safetensors"
    providers: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(self, provider: str = "cpu", host: Host | None = None) -> None:
        self._provider = provider
        self._host = Slot() if host is None else host
        self._is_prepared = False

    @property
    def held_bytes(self) -> int:
        """Memory that the session kept for the next job holds."""
        return self._host.held_bytes

    def describe_runtime(self) -> str:
        """See `Trainer.describe_runtime`."""
        self._prepare()
        import torch

        return f"PyTorch {torch.__version__} on {self._provider}"

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `describe_source` for what it raises.

        PyTorch is loaded here too, so that the memory that is free from now on is what training can really have.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        self._prepare()
        return describe_source(data)

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `train_job` for what it does and raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        self._prepare()
        open_session = partial(_open, self._provider)
        return train_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def score(self, job: ScoreJob, stopped: Callable[[], bool]) -> float:
        """Score a candidate; see `score_job` for what it does and raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        self._prepare()
        open_session = partial(_open, self._provider)
        return score_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def evaluate(self, job: EvaluateJob, stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model; see `evaluate_job` for what it does and raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        self._prepare()
        open_session = partial(_open, self._provider)
        return evaluate_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model, a tensor container that names its network, over a data set.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: the file is no such model.
        """
        self._prepare()
        import torch

        from subfleet.export.targets.torch import read_torch_model

        torch.set_num_threads(threads)
        try:
            described, module = read_torch_model(read_model(model_path))
        except (ConfigError, ProtocolError) as error:
            raise TrainingError(f"model {str(model_path)!r} cannot be used: {error}") from error
        module.to(self._provider)

        def infer(samples: Array) -> Array:
            with torch.no_grad():
                logits: torch.Tensor = _guarded(lambda: module(_tensor(samples, self._provider)))
            return logits.cpu().numpy()

        dataset = model_data(data, sample_shape=described.model.input_shape, classes=described.classes)
        return predict_dataset(infer, dataset, batch_size=FREE_BATCH_SIZE, classes=described.classes)

    def _prepare(self) -> None:
        if not self._is_prepared:
            _prepare(self._provider)
            self._is_prepared = True


class TorchSession:
    """See `StepSession`."""

    def __init__(self, step: "Step", layout: SessionLayout, threads: int, provider: str) -> None:
        self._step = step
        self._layout = layout
        self._threads = threads
        self._provider = provider
        self._carried: dict[str, torch.Tensor] = {}
        self._constants: dict[str, torch.Tensor] = {}

    def begin(self, stored: Mapping[str, Array], constants: Mapping[str, Array]) -> None:
        """See `StepSession.begin`."""
        import torch

        # Here, because PyTorch's number of threads belongs to the thread that asks, and each job has one of its own.
        torch.set_num_threads(self._threads)
        self._carried = {name: _tensor(np.array(array), self._provider) for name, array in stored.items()}
        self._carried |= {name: _tensor(array, self._provider) for name, array in zeros(self._layout).items()}
        self._constants = {name: _tensor(array, self._provider) for name, array in constants.items()}

    def step(self, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        """See `StepSession.step`."""
        del last
        import torch

        values = self._constants | self._carried | {name: _tensor(fed[name], self._provider) for name in fed}
        arguments = [values[value.name] for value in self._step.inputs]
        with torch.device(self._provider):
            results = _guarded(lambda: self._step.run(*arguments))
        outputs = {value.name: result for value, result in zip(self._step.outputs, results, strict=True)}
        self._carried = {old: outputs[new] for old, new in self._layout.carried.items()}
        return {name: outputs[name].cpu().numpy() for name in self._layout.read}

    def gradients(self) -> Mapping[str, Array]:
        """See `StepSession.gradients`."""
        return {value.tensor: np.array(self._carried[value.name].cpu().numpy()) for value in self._layout.gradients}

    def finish(self) -> Mapping[str, Array]:
        """See `StepSession.finish`."""
        carried, self._carried, self._constants = self._carried, {}, {}
        return {value.name: carried[value.name].cpu().numpy() for value in self._layout.stored}


def _open(provider: str, program: Program, layout: SessionLayout, threads: int) -> StepSession:
    from subfleet.export.targets.torch import read_torch_step
    from subfleet.export.versions import FORMAT_VERSION

    written = program.manifest.versions.get("subfleet.export")
    if written != str(FORMAT_VERSION):
        raise TrainingError(
            f"the program is of format {written}, but this trainer runs format {FORMAT_VERSION}; use the same release "
            "of Subfleet on server and device"
        )
    try:
        step = read_torch_step(program)
    except (ConfigError, ExportError, ProtocolError) as error:
        raise TrainingError(f"PyTorch's program cannot be used: {error}; it must be exported again") from error
    return TorchSession(step, layout, threads, provider)


def _prepare(provider: str) -> None:
    try:
        import torch

        from subfleet.export.targets.torch import run_smallest_step
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "export", remedy=_REMEDY) from error
    if provider == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"the provider 'cuda' needs a CUDA device, but PyTorch {torch.__version__} finds none; install a build "
            "with CUDA and its driver, or leave --provider out"
        )
    # What PyTorch loads with its first step is there whatever is trained.
    run_smallest_step(provider)


def _tensor(array: Array, provider: str) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(provider)


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (MemoryError, SubfleetError):
        raise
    # PyTorch raises RuntimeError for most failures, and others where arguments do not fit.
    except Exception as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"PyTorch refused the program ({reason:.300}); it must be exported again") from error
