"""Trains and predicts with ExecuTorch's plain runtime: through our native binding, else through its own and PyTorch."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from subfleet.protocol.errors import MissingExtraError, TrainingError
from subfleet.protocol.loading import unloadable
from subfleet.protocol.programs import (
    DataSummary,
    EvaluateJob,
    EvaluationResult,
    Prediction,
    ScoreJob,
    TrainJob,
    TrainResult,
)
from subfleet.tasks import describe_source
from subfleet.trainers.chain_evaluating import evaluate_paths
from subfleet.trainers.chain_training import train_chain
from subfleet.trainers.evaluating import evaluate_job
from subfleet.trainers.executorch_runtime import ExecutorchRuntime
from subfleet.trainers.kept import Host, Slot
from subfleet.trainers.prediction import model_form, predict_dataset, read_model
from subfleet.trainers.scoring import score_job
from subfleet.trainers.training import train_job

__all__ = ["ExecutorchTrainer", "find_runtime"]

# Devices get no PyTorch, which ExecuTorch's own bindings need.
_REMEDY = (
    "install the wheel of subfleet-executorch that was built for this device, or use ONNX Runtime: --runtime onnx for "
    "training, and .onnx models"
)


class ExecutorchTrainer:
    """The trainer of programs and models in the ExecuTorch format.

    Args:
        host: the process that it trains in; without one, a device's own.
    """

    target: ClassVar[str] = "executorch"
    suffix: ClassVar[str] = ".pte"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, host: Host | None = None) -> None:
        self._given = host
        self._host = host or Slot()

    @property
    def held_bytes(self) -> int:
        """Memory that the session kept for the next job holds."""
        return self._host.held_bytes

    def describe_runtime(self) -> str:
        """See `Trainer.describe_runtime`."""
        return find_runtime().name

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `describe_source` for what it raises.

        The runtime is loaded here too, so that the memory that is free from now on is what training can really have.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        find_runtime()
        return describe_source(data)

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `train_job`, and for jobs with paths `train_chain`, for what it does and raises.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        runtime = find_runtime()
        if job.paths is not None:
            return train_chain(job, stopped, target=self.target, open_pieces=runtime.open_pieces, slot=self._host)
        return train_job(job, stopped, target=self.target, open_session=runtime.open_session, slot=self._host)

    def score(self, job: ScoreJob, stopped: Callable[[], bool]) -> float:
        """Score a candidate; see `score_job` for what it does and raises.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        open_session = find_runtime().open_session
        return score_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def evaluate(self, job: EvaluateJob, stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model, or the paths of a population; see `evaluate_job` and `evaluate_paths` for what that raises.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
        """
        runtime = find_runtime()
        if job.settings.population:
            return evaluate_paths(job, stopped, target=self.target, open_pieces=runtime.open_pieces, slot=self._host)
        return evaluate_job(job, stopped, target=self.target, open_session=runtime.open_session, slot=self._host)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model with one input, (batch, *sample shape), whose first output is the logits.

        Raises:
            MissingExtraError: ExecuTorch is not installed.
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: ExecuTorch refuses the model.
        """
        runtime = find_runtime()
        self._host = self._given or Slot()  # what is kept may run on another number of threads
        model = runtime.open_model(read_model(model_path), threads)
        inputs = model.shapes.inputs
        if len(inputs) != 1 or len(inputs[0][1]) < 2 or not model.shapes.outputs:
            raise TrainingError(f"model {str(model_path)!r} must have one input of shape (batch, *sample shape)")
        dtype, (batch_size, *sample_shape) = inputs[0]
        form = model_form(model_path, model.note, sample_shape=tuple(sample_shape), dtype=dtype)
        return predict_dataset(model.infer, form.data(data), batch_size=batch_size, form=form)


def find_runtime() -> ExecutorchRuntime:
    """The native binding where it is installed, else ExecuTorch's own bindings.

    Raises:
        MissingExtraError: neither is installed.
        BrokenError: one is, and cannot be loaded.
    """
    try:
        if find_spec("subfleet_executorch") is not None:
            from subfleet.trainers.executorch_native import NativeRuntime

            return NativeRuntime()
        from subfleet.trainers.executorch_bindings import BindingsRuntime

        return BindingsRuntime()
    except ModuleNotFoundError as error:
        raise MissingExtraError("subfleet_executorch", "edge", remedy=_REMEDY) from error
    except Exception as error:
        raise unloadable("executorch", error) from error
