"""The message that gives a device something to do: an envelope, and one of five kinds of work."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.calibration import Calibration
from subfleet.protocol.candidate_scores import MAX_CANDIDATES
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.exhaustive import never
from subfleet.protocol.identifiers import ClientId, Shown, new_message_id
from subfleet.protocol.limits import RunId, Seconds, TaskId
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed

__all__ = ["Calibrate", "Deploy", "Evaluate", "Score", "ScoringCandidate", "Task", "Train", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train the submodel on the device's data; an `Update` answers.

    Attributes:
        program: trains the submodel.
        weights: of the submodel, to begin with.
        settings: of the training.
        update_codec: encodes the update.
        sends: names of the tensors that the update holds; empty for all.
        paths: how a path is drawn for each batch, where the architecture is a subspace and the program a chain. The
            task's `planned_peak_bytes` is then that of the leanest path, and the device draws paths that fit the memory
            that it has now. None where the architecture is a single network.
    """

    TYPE: ClassVar[str] = "train"
    program: ProgramRef
    weights: BlobRef
    settings: TrainingSettings
    update_codec: AnyUpdateCodec = field(default_factory=Uncompressed)
    sends: tuple[str, ...] = ()
    paths: PathSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Sum up the inputs of norms in one pass over the device's data; an `Update` with the sums answers.

    Attributes:
        program: trains the submodel; at learning rate 0 it changes nothing.
        weights: of the submodel.
        settings: size and order of the batches.
        calibration: the norms.
    """

    TYPE: ClassVar[str] = "calibrate"
    program: ProgramRef
    weights: BlobRef
    settings: TrainingSettings
    calibration: Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCandidate:
    """A submodel to be scored.

    Attributes:
        architecture: of the submodel.
        program: sums its gradients.
        weights: as they are before any training.
    """

    architecture: Architecture
    program: ProgramRef
    weights: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Score:
    """Score candidates on the device's data; `Scores` answers.

    Attributes:
        candidates: from the smallest to the largest, 1 to 16.
        settings: size of the batches, and the objective.
        batches: number of batches whose gradients are compared, 2 or more; all are of the device's first epoch in
            round 0.
    """

    TYPE: ClassVar[str] = "score"
    candidates: Annotated[tuple[ScoringCandidate, ...], Length(least=1, most=MAX_CANDIDATES)]
    settings: TrainingSettings
    batches: Annotated[int, Range(least=2)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate the weights, as they were sent, on the device's held-out data; `Evaluated` answers.

    Attributes:
        program: evaluates the submodel.
        weights: of the submodel.
        settings: of the evaluation.
    """

    TYPE: ClassVar[str] = "evaluate"
    program: ProgramRef
    weights: BlobRef
    settings: EvaluationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Deploy:
    """Keep the submodel's inference models; `Deployed` answers.

    Attributes:
        models: one for each target, 1 or more.
    """

    TYPE: ClassVar[str] = "deploy"
    models: Annotated[tuple[ProgramRef, ...], Length(least=1)]


Work = Train | Calibrate | Score | Evaluate | Deploy
"""What a device can be asked to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Task:
    """Work for one device (retained on its own topic). A device works on the newest task of the current run.

    Attributes:
        task_id: names the task; the answer repeats it.
        run_id: of the run, as is round.
        client_id: of the device.
        architecture: the submodel; of a score task the largest candidate.
        work: what to do.
        planned_peak_bytes: planned memory of the program that needs most.
        budget: what the device had offered when the task was made.
        deadline_s: seconds after which an answer is of no use.
        retry: of the announcement of the task's round.
        classes: the run's names of classes, in the order of its model's, by which the device maps data with named
            classes; empty where the run numbers its classes.
        transform: applied to each sample before it is fed; None feeds samples as they are.
    """

    KIND: ClassVar[str] = "task"
    task_id: Annotated[TaskId, Shown]
    run_id: Annotated[RunId, Shown]
    round: int
    client_id: ClientId
    architecture: Architecture
    work: Work
    planned_peak_bytes: int
    budget: Budget
    deadline_s: Seconds
    message_id: Annotated[str, Length(most=384), Shown] = field(default_factory=new_message_id)
    retry: int = 0
    classes: ClassNames = ()
    transform: DataTransform | None = None

    @property
    def programs(self) -> tuple[ProgramRef, ...]:
        """The program of the work, those of its candidates, or its models."""
        match self.work:
            case Score(candidates=candidates):
                programs = tuple(candidate.program for candidate in candidates)
            case Deploy(models=models):
                programs = models
            case Train() | Calibrate() | Evaluate():
                programs = (self.work.program,)
            case _:
                never(self.work)
        return programs

    @property
    def weights(self) -> tuple[BlobRef, ...]:
        """The weights of the work, or of each of its candidates; none of a deploy task."""
        match self.work:
            case Score(candidates=candidates):
                weights = tuple(candidate.weights for candidate in candidates)
            case Deploy():
                weights = ()
            case Train() | Calibrate() | Evaluate():
                weights = (self.work.weights,)
            case _:
                never(self.work)
        return weights

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Everything to fetch, each once."""
        blobs = (*(program.blob for program in self.programs), *self.weights)
        return tuple({blob.sha256: blob for blob in blobs}.values())
