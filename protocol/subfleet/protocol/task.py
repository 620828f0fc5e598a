"""The message that gives a device something to do."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.calibration import Calibration
from subfleet.protocol.candidate_scores import Scoring
from subfleet.protocol.class_names import check_class_names
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.identifiers import check_client_id, new_message_id
from subfleet.protocol.limits import TASK_LIMITS, check_lengths, check_names, check_seconds
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed

__all__ = ["Task", "Work"]

Work = Literal["train", "deploy", "score", "calibrate", "evaluate"]
"""What a device can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for one device (retained on its own topic). A device works on the newest task of the current run.

    Attributes:
        task_id: names the task; an update, scores, an evaluation, a refusal or a report answer it.
        work: "train" trains; "calibrate" measures the running statistics of norms on the device's own data; "score"
            scores candidates on them; "evaluate" says how good the weights are, as they were sent, on its held-out
            data; "deploy" fetches inference models.
        spec: the subnet; of a score task the largest candidate.
        programs: to fetch: one to train, calibrate or evaluate, one for each candidate, or an inference model per
            target to keep.
        weights: the subnet's weights (train, calibrate and evaluate only).
        training: how to train; for a score task, which batches and what is minimised; for a calibrate task, which
            batches, at learning rate 0.
        planned_peak_bytes: planned memory of the program that needs most.
        budget: what the device had promised when the task was made.
        deadline_s: seconds within which an answer is worth something.
        scoring: the candidates (score only).
        update_codec: how the device is to write its update (train only).
        calibration: the norms (calibrate only).
        retry: of the announcement of the round that it belongs to.
        sends: names of the tensors whose change the device sends (train only); empty sends all.
        classes: the run's names of classes, in the order of its model's: the device maps data that name theirs by them.
            Empty where the run numbers its classes.
        evaluation: how to evaluate (evaluate only).
        paths: how paths of the spec, a subspace, are drawn (train only, with a chain as its program); None where the
            spec is a network by itself. `planned_peak_bytes` is then that of its leanest path, and the device draws
            paths that have room in what it has now.
        transform: what the device does to each of its samples before it is fed; None feeds them as they are.
    """

    KIND: ClassVar[str] = "task"
    task_id: str
    work: Work
    run_id: str
    round: int
    client_id: str
    spec: SubnetSpec
    programs: tuple[ProgramRef, ...]
    weights: BlobRef | None
    training: TrainingSettings | None
    planned_peak_bytes: int
    budget: Budget
    deadline_s: float
    message_id: str = field(default_factory=new_message_id)
    scoring: Scoring | None = field(default=None, metadata=ADDED_LATER)
    update_codec: AnyUpdateCodec = field(default=Uncompressed(), metadata=ADDED_LATER)
    calibration: Calibration | None = field(default=None, metadata=ADDED_LATER)
    retry: int = field(default=0, metadata=ADDED_LATER)
    classes: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    sends: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    evaluation: EvaluationSettings | None = field(default=None, metadata=ADDED_LATER)
    paths: PathSettings | None = field(default=None, metadata=ADDED_LATER)
    transform: DataTransform | None = field(default=None, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        check_client_id(self.client_id)
        check_lengths(self, TASK_LIMITS)
        check_names(self, "run_id", "task_id", "message_id")
        check_seconds("deadline_s", self.deadline_s)
        check_class_names(self.classes)
        if not self.programs:
            raise ValueError("a task must name 1 or more programs")
        trains = self.work in ("train", "calibrate")
        if trains and (len(self.programs) != 1 or self.weights is None or self.training is None):
            raise ValueError(f"a {self.work} task must name one program, weights and training settings")
        if (self.work == "calibrate") != (self.calibration is not None):
            raise ValueError("a calibrate task, and no other, must name norms")
        if (self.work == "score") != (self.scoring is not None):
            raise ValueError("a score task, and no other, must name candidates")
        if self.scoring is not None and (len(self.programs) != len(self.scoring.specs) or self.training is None):
            raise ValueError("a score task must name training settings, and a program for each candidate")
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        if (self.work == "evaluate") != (self.evaluation is not None):
            raise ValueError("an evaluate task, and no other, must name evaluation settings")
        if self.work != "evaluate":
            return
        if len(self.programs) != 1 or self.weights is None or self.training is not None:
            raise ValueError("an evaluate task must name one program and weights, and no training settings")

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Everything to fetch, each once."""
        weights = (self.weights, *(() if self.scoring is None else self.scoring.weights))
        wanted = (*(program.blob for program in self.programs), *(blob for blob in weights if blob is not None))
        return tuple({blob.sha256: blob for blob in wanted}.values())
