"""The message that gives a device work: an envelope, submodels, and one of five kinds of work."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.calibration import Calibration
from subfleet.protocol.candidate_scores import MAX_CANDIDATES
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.identifiers import ClientId, Shown, make_message_id
from subfleet.protocol.limits import Count, RunId, Seconds, TaskId
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train a submodel on the device's data; `Update` answers.

    Attributes:
        settings: settings of the training.
        update_codec: encodes the update.
        sends: names of the tensors that the update contains; empty for all.
        paths: how a path is drawn for each batch, if the architecture is a subspace and the program a chain. The
            task's `planned_peak_bytes` is then that of the leanest path, and the device draws paths that fit its free
            memory. None if the architecture is a single network.
    """

    TYPE: ClassVar[str] = "train"
    settings: TrainingSettings
    update_codec: AnyUpdateCodec = field(default_factory=Uncompressed)
    sends: tuple[str, ...] = ()
    paths: PathSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Sum the inputs of norms in one pass over the device's data; an `Update` with the sums answers.

    Attributes:
        settings: size and order of the batches; the learning rate is 0, so that the program changes nothing.
        calibration: the norms.
    """

    TYPE: ClassVar[str] = "calibrate"
    settings: TrainingSettings
    calibration: Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Score:
    """Score candidates on the device's data; `Scores` answers.

    Attributes:
        settings: size of the batches, and the objective.
        batches: number of batches, 2 or more, whose gradients are compared; all are from the device's first epoch in
            round 0.
    """

    TYPE: ClassVar[str] = "score"
    settings: TrainingSettings
    batches: Annotated[int, Range(least=2)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate the weights as they were sent, on the device's held-out data; `Evaluated` answers."""

    TYPE: ClassVar[str] = "evaluate"
    settings: EvaluationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Keep the submodel's inference models; `Deployed` answers."""

    TYPE: ClassVar[str] = "deploy"


Work = Train | Calibrate | Score | Evaluate | Deploy
"""What a device can be asked to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TaskSubmodel:
    """A submodel and the files that a task works with.

    Attributes:
        architecture: identifies the submodel.
        program: trains, scores or evaluates it; for a deploy task, an inference model.
        weights: the initial weights; None for a deploy task.
        frozen: the weights that training does not change, in a blob of their own, which a device fetches once; None if
            training changes all.
        forward_macs: multiply-accumulates of one sample's forward pass, as the server estimates them; 0 is unknown.
    """

    architecture: Architecture
    program: ProgramRef
    weights: BlobRef | None = None
    frozen: BlobRef | None = field(default=None, metadata=ADDED_LATER)
    forward_macs: Count = field(default=0, metadata=ADDED_LATER)


def _check_submodels(submodels: tuple[TaskSubmodel, ...], work: Work) -> Iterator[str]:
    if len(submodels) != 1 and isinstance(work, Train | Calibrate | Evaluate):
        yield f"a task to {work.TYPE} has {len(submodels)} submodels, but must have 1"
    if any((submodel.weights is None) != isinstance(work, Deploy) for submodel in submodels):
        yield "each submodel must have weights, unless the task is to deploy models"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_submodels)
class Task:
    """Work for one device (retained on its own topic). A device works on the newest task of the current run.

    Attributes:
        task_id: identifies the task; the answer repeats it.
        run_id: the run.
        round: the round.
        client_id: the device.
        submodels: one submodel; for a score task 1 to 16 candidates from the smallest to the largest; for a deploy task
            one for each target.
        work: what to do.
        planned_peak_bytes: planned memory of the largest program.
        budget: the device's budget when the task was made.
        deadline_s: seconds after which an answer is ignored.
        attempt: attempt of the round.
        classes: the run's class names, in the order of its model's outputs, by which the device maps data with named
            classes; empty if the run numbers its classes.
        transform: applied to each sample before it is fed; None feeds samples as they are.
    """

    KIND: ClassVar[str] = "task"
    task_id: Annotated[TaskId, Shown]
    run_id: Annotated[RunId, Shown]
    round: int
    client_id: ClientId
    submodels: Annotated[tuple[TaskSubmodel, ...], Length(least=1, most=MAX_CANDIDATES)]
    work: Work
    planned_peak_bytes: int
    budget: Budget
    deadline_s: Seconds
    message_id: Annotated[str, Length(most=384), Shown] = field(default_factory=make_message_id)
    attempt: int = 0
    classes: ClassNames = ()
    transform: DataTransform | None = None

    @property
    def architecture(self) -> Architecture:
        """Architecture of the submodel, or of a score task's largest candidate."""
        return self.submodels[-1].architecture

    @property
    def programs(self) -> tuple[ProgramRef, ...]:
        """The program of each submodel."""
        return tuple(submodel.program for submodel in self.submodels)

    @property
    def weights(self) -> tuple[BlobRef, ...]:
        """The weights of each submodel, without frozen ones; empty for a deploy task."""
        return tuple(submodel.weights for submodel in self.submodels if submodel.weights is not None)

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Everything to fetch, each blob once."""
        frozen = (submodel.frozen for submodel in self.submodels if submodel.frozen is not None)
        blobs = (*(program.blob for program in self.programs), *frozen, *self.weights)
        return tuple({blob.sha256: blob for blob in blobs}.values())
