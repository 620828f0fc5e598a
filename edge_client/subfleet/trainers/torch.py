"""Trains and predicts with PyTorch itself, on the CPU or a CUDA device, where it is installed anyway.

It runs the very step that the programs of other targets are traced from, so it is also what they are compared with.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from subfleet.protocol.errors import ConfigError, MissingExtraError, ProtocolError, TrainingError
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
from subfleet.trainers.kept import Host, Slot
from subfleet.trainers.prediction import FREE_BATCH_SIZE, ModelForm, predict_dataset, read_model
from subfleet.trainers.scoring import score_job
from subfleet.trainers.sessions import Array
from subfleet.trainers.torch_session import TorchPieces, guarded, open_session, tensor_of
from subfleet.trainers.training import train_job

__all__ = ["TorchTrainer"]

# This trainer is for machines that have PyTorch anyway; a device is sent to what it can run without.
_REMEDY = "use ONNX Runtime, which devices have: --runtime onnx for training, and .onnx models"


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
        """Train; see `train_job`, and for jobs with paths `train_chain`, for what it does and raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        self._prepare()
        if job.paths is not None:
            open_pieces = partial(TorchPieces, self._provider)
            return train_chain(job, stopped, target=self.target, open_pieces=open_pieces, slot=self._host)
        opens = partial(open_session, self._provider)
        return train_job(job, stopped, target=self.target, open_session=opens, slot=self._host)

    def score(self, job: ScoreJob, stopped: Callable[[], bool]) -> float:
        """Score a candidate; see `score_job` for what it does and raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        self._prepare()
        opens = partial(open_session, self._provider)
        return score_job(job, stopped, target=self.target, open_session=opens, slot=self._host)

    def evaluate(self, job: EvaluateJob, stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model, or the paths of a population; see `evaluate_job` and `evaluate_paths` for what that raises.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ConfigError: it has no such device.
        """
        self._prepare()
        if job.settings.population:
            open_pieces = partial(TorchPieces, self._provider)
            return evaluate_paths(job, stopped, target=self.target, open_pieces=open_pieces, slot=self._host)
        opens = partial(open_session, self._provider)
        return evaluate_job(job, stopped, target=self.target, open_session=opens, slot=self._host)

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
                logits = guarded(lambda: module(tensor_of(samples, self._provider)))
            found: Array = logits.cpu().numpy()
            return found

        form = ModelForm(
            sample_shape=described.model.input_shape,
            classes=described.classes,
            objective=described.objective,
            transform=described.transform,
        )
        return predict_dataset(infer, form.data(data), batch_size=FREE_BATCH_SIZE, form=form)

    def _prepare(self) -> None:
        if not self._is_prepared:
            _prepare(self._provider)
            self._is_prepared = True


def _prepare(provider: str) -> None:
    try:
        import torch

        from subfleet.export.targets.torch import run_smallest_step
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "export", remedy=_REMEDY) from error
    except Exception as error:
        raise unloadable("torch", error) from error
    if provider == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"the provider 'cuda' needs a CUDA device, but PyTorch {torch.__version__} finds none; install a build "
            "with CUDA and its driver, or leave --provider out"
        )
    # What PyTorch loads with its first step is there whatever is trained.
    run_smallest_step(provider)
