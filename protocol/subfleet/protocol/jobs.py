"""The seam between the agent and a runtime: a trainer, the jobs that it does and their results, as plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.transform import DataTransform

__all__ = [
    "AnyJob",
    "DataSummary",
    "Job",
    "Prediction",
    "TrainResult",
    "Trainer",
]

WorkT_co = TypeVar("WorkT_co", bound=Train | Calibrate | Score | Evaluate, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[WorkT_co]):
    """A task's work on one submodel, with the files and limits on this device.

    Attributes:
        work: what to do.
        program_path: the packed program; it must be made for the work.
        weights_path: container of the submodel's weights and buffers.
        frozen_path: container of the weights that training does not change; None if they are in `weights_path`.
        output_path: where training writes the container of the change (new minus old), and calibration its sums; other
            work writes nothing.
        data: the data set, as `--data` or `--held-out` names it.
        round: number of the round; with `client_id` and the seed it determines the order of the data and the rounding
            of codecs.
        client_id: of this device.
        memory_limit_bytes: the most by which the process may grow.
        threads: of the runtime.
        classes: the run's class names, in the order of its model's outputs; empty if it numbers them.
        choices: the operators that the submodel keeps of each choice, as in `Architecture`.
        transform: applied to each sample before it is fed; None feeds samples as they are.
    """

    work: WorkT_co
    program_path: Path
    weights_path: Path
    output_path: Path
    data: str
    client_id: str
    memory_limit_bytes: int
    round: int = 0
    threads: int = 1
    classes: tuple[str, ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    transform: DataTransform | None = None
    frozen_path: Path | None = None

    @property
    def tensor_paths(self) -> tuple[Path, ...]:
        """The containers with the tensors that the program takes."""
        return (self.weights_path,) if self.frozen_path is None else (self.weights_path, self.frozen_path)


AnyJob = Job[Train | Calibrate | Score | Evaluate]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a training or a calibration.

    Attributes:
        sample_count: of the client's data.
        step_count: steps taken.
        loss: mean over the labels that counted in the last epoch, each computed before its step.
        accuracy: fraction of them that was predicted correctly; 0 if accuracy has no meaning.
        measured_peak_bytes: growth of the process's high-water mark during training.
        train_seconds: wall time of the steps.
        square_loss: mean of the squares of the same losses; None unless the task's objective asks for it.
        operator_examples: if paths were drawn, the examples that went through each operator.
    """

    sample_count: int
    step_count: int
    loss: float
    accuracy: float
    measured_peak_bytes: int
    train_seconds: float
    square_loss: float | None = None
    operator_examples: OperatorExamples = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What is known of a client's data: counts, shapes and sizes, never samples.

    Attributes:
        sample_count: 1 or more.
        input_shape: of one sample.
        class_counts: labels per class, in the order of `class_names` if the classes are named, else up to the last
            class that occurs; empty if labels are numbers.
        data_bytes: memory that samples and labels take during training, whatever the submodel.
        class_names: of the counted classes; empty if the data number them.
        other_input_shapes: other shapes that a sample can be read in, such as gray and coloured pictures.
        inputs: statistics of all values of the samples; None if they were not computed.
        sizes_differ: pictures have several sizes, and `input_shape` is the most frequent one.
        streams: only the transformed samples are ever in memory together: they are read one by one, or were
            transformed before.
    """

    sample_count: int
    input_shape: tuple[int, ...]
    class_counts: tuple[int, ...]
    data_bytes: int = 0
    class_names: tuple[str, ...] = ()
    other_input_shapes: tuple[tuple[int, ...], ...] = ()
    inputs: InputStatistics | None = None
    sizes_differ: bool = False
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Outputs of an inference model on a data set.

    Attributes:
        labels: predicted classes, one for each label of the data set, in its order; for targets of 0 and 1, which one.
        metrics: of the model's kind of task, on these labels, by their names in `subfleet.protocol.task_kinds`.
        headline: the metric that the model is judged by.
        classes: the model's class names, in its order; empty if it numbers them.
        numbers: predictions of a model of numbers, instead of labels.
    """

    labels: tuple[int, ...]
    metrics: Mapping[str, float]
    headline: str = "accuracy"
    classes: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Fraction of the counted labels that was predicted correctly; None if accuracy has no meaning."""
        return self.metrics.get("accuracy")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each predicted class, or its number if the model has no names."""
        return tuple(self.classes[label] if self.classes else str(label) for label in self.labels)


class Trainer(Protocol):
    """Runs programs on one runtime. The agent makes it by entry-point name (group `subfleet.trainers`)."""

    @property
    def target(self) -> str:
        """The kind of program that it runs."""
        ...

    @property
    def suffix(self) -> str:
        """File ending of its inference models."""
        ...

    @property
    def providers(self) -> tuple[str, ...]:
        """What can compute, such as "cpu" and "cuda"; the first one is the default.

        The factory of a trainer with several providers takes the argument `provider`.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that is kept between two jobs. The next job uses it, or frees it before it takes more."""
        ...

    def describe_runtime(self) -> str:
        """Load the runtime; return its name and version, and what it computes with.

        Raises:
            MissingExtraError: it is not installed, or cannot be loaded.
            ConfigError: it lacks the provider.
        """
        ...

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set. Raises DataError if it cannot be used."""
        ...

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        """Train; calls `stopped` between steps.

        Raises:
            MemoryLimitError: the process grew beyond the limit.
            LoadError: the runtime refuses the program.
            TrainingError: the program failed, or was stopped.
            DataError: the data do not fit the program.
        """
        ...

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        """Sum the inputs of norms; raises as `train`."""
        ...

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        """Compute the ZiCo score of a candidate before training; raises as `train`."""
        ...

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model on held-out data. Raises as `train`."""
        ...

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run an inference model (a plain .onnx or .pte file) over a data set."""
        ...
