"""The trainer of all runtimes: it trains, calibrates, scores, evaluates and predicts with one of them."""

from collections.abc import Callable
from pathlib import Path

from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, TrainResult
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.tasks import describe_source
from subfleet.trainers.calibration_job import calibrate_job
from subfleet.trainers.evaluation_job import evaluate_job
from subfleet.trainers.kept import Host, Slot
from subfleet.trainers.prediction import predict_dataset, read_model
from subfleet.trainers.runtime import Runtime, RuntimeKind
from subfleet.trainers.scoring_job import score_job
from subfleet.trainers.training_job import train_job


class RuntimeTrainer:
    """See `Trainer`; every method also raises the errors of `RuntimeKind.load` if the runtime is not loaded yet.

    Args:
        kind: the runtime.
        provider: one of the runtime's providers.
        host: the process that it trains in; None for a device's own.
    """

    def __init__(self, kind: RuntimeKind, provider: str = "cpu", host: Host | None = None) -> None:
        self._kind = kind
        self._provider = provider
        self._given = host
        self._host = host or Slot()
        self._runtime: Runtime | None = None

    @property
    def target(self) -> str:
        """See `Trainer.target`."""
        return self._kind.target

    @property
    def suffix(self) -> str:
        """See `Trainer.suffix`."""
        return self._kind.suffix

    @property
    def providers(self) -> tuple[str, ...]:
        """See `Trainer.providers`."""
        return self._kind.providers

    @property
    def held_bytes(self) -> int:
        """Memory that the package kept for the next job holds."""
        return self._host.held_bytes

    def describe_runtime(self) -> str:
        """See `Trainer.describe_runtime`."""
        return self._load().name

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; raises as `describe_source`.

        The runtime is loaded here, too, so that memory that is free later is really available to training.
        """
        self._load()
        return describe_source(data)

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `train_job`."""
        # Before anything is measured: the library is loaded for any submodel.
        return train_job(job, stopped, target=self.target, runtime=self._load(), host=self._host)

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        """Sum the inputs of norms; see `calibrate_job`."""
        return calibrate_job(job, stopped, target=self.target, runtime=self._load(), host=self._host)

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        """Score a candidate; see `score_job`."""
        return score_job(job, stopped, target=self.target, runtime=self._load(), host=self._host)

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model, or the paths of a population; see `evaluate_job`."""
        return evaluate_job(job, stopped, target=self.target, runtime=self._load(), host=self._host)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model with one input of shape (batch, *sample shape) and the logits as its first output.

        Raises:
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: the runtime refuses the model.
        """
        runtime = self._load()
        self._host = self._given or Slot()  # the kept package may run on another number of threads
        model = runtime.open_model(model_path, read_model(model_path), threads)
        return predict_dataset(model, model.form.data(data))

    def _load(self) -> Runtime:
        if self._runtime is None or self._kind.reloads:
            self._runtime = self._kind.load(self._provider)
        return self._runtime
