"""What a trainer is handed: one piece of work on a device, as plain data; and what comes of a training."""

from dataclasses import dataclass, field
from pathlib import Path

from subfleet.protocol.calibration import Calibration
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.paths import OperatorExamples, PathSettings
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed

__all__ = ["EvaluateJob", "ScoreJob", "TrainJob", "TrainResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One training on a device.

    Attributes:
        program_path: the packed program.
        weights_path: container of the submodel's weights and buffers.
        output_path: where the container of their change (new minus old) is to be written.
        data: what `--data` names.
        settings: from the task.
        round: number of the round, for the data order and the codec's rounding.
        client_id: of this client, for the same.
        memory_limit_bytes: the most by which the process may grow.
        threads: of the runtime.
        update_codec: how the change is to be written.
        calibration: in place of training, the norms whose inputs are summed up in one pass over the data, and nothing
            is changed; None trains.
        classes: the run's names of classes, in the order of its model's; empty where it numbers them.
        sends: names of the tensors whose change is written; empty writes that of all.
        paths: how a path is drawn for each batch, where the program is a chain.
        choices: with it, the operators that the job's subspace keeps of each choice, as in `Architecture`.
        transform: what is done to each sample before it is fed; None feeds it as it is.
    """

    program_path: Path
    weights_path: Path
    output_path: Path
    data: str
    settings: TrainingSettings
    round: int
    client_id: str
    memory_limit_bytes: int
    threads: int = 1
    update_codec: AnyUpdateCodec = field(default_factory=Uncompressed)
    calibration: Calibration | None = None
    classes: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    paths: PathSettings | None = None
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    transform: DataTransform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """One candidate that a device scores on its own data.

    Attributes:
        program_path: the packed program; it must sum gradients.
        weights_path: container of the candidate's weights and buffers before any training; they stay as they are.
        data: what `--data` names.
        settings: size of a batch and of its parts, and the seed.
        batches: whose gradients are compared.
        client_id: of this client, for the data order.
        memory_limit_bytes: the most by which the process may grow.
        threads: of the runtime.
        classes: as in `TrainJob`.
        transform: as in `TrainJob`.
    """

    program_path: Path
    weights_path: Path
    data: str
    settings: TrainingSettings
    batches: int
    client_id: str
    memory_limit_bytes: int
    threads: int = 1
    classes: tuple[str, ...] = ()
    transform: DataTransform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateJob:
    """One evaluation of a model on a device.

    Attributes:
        program_path: the packed program; its purpose is "evaluate".
        weights_path: container of the model's weights and buffers; they stay as they are.
        data: what `--held-out` names.
        settings: from the task.
        memory_limit_bytes: the most by which the process may grow.
        threads: of the runtime.
        classes: as in `TrainJob`.
        choices: as in `TrainJob`, where the settings name a population.
        transform: as in `TrainJob`.
    """

    program_path: Path
    weights_path: Path
    data: str
    settings: EvaluationSettings
    memory_limit_bytes: int
    threads: int = 1
    classes: tuple[str, ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    transform: DataTransform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What came of a training.

    Attributes:
        sample_count: of the client's data.
        step_count: steps taken.
        loss: mean over the labels that counted in the last epoch, each taken before its step.
        accuracy: share of them that were predicted rightly; 0 where that means nothing.
        measured_peak_bytes: growth of the process's high-water mark while it trained.
        train_seconds: wall time of the steps.
        square_loss: mean of the squares of the same losses; None where the task's objective asks for none.
        operator_examples: where paths were drawn, the examples that went through each operator.
    """

    sample_count: int
    step_count: int
    loss: float
    accuracy: float
    measured_peak_bytes: int
    train_seconds: float
    square_loss: float | None = None
    operator_examples: OperatorExamples = ()
