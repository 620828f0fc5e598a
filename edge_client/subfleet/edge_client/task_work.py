"""Does one task: trains, calibrates, scores or evaluates; success and failure both are returned as an outcome."""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from subfleet.agent.outcomes import Ended, EvaluationEnded, ScoringEnded, TrainingEnded, WorkFailed
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.errors import (
    DataError,
    DivergedError,
    FileError,
    LoadError,
    MemoryLimitError,
    NoRoomError,
    ProtocolError,
    SubfleetError,
    TrainingError,
)
from subfleet.protocol.evaluating import NO_HELD_OUT
from subfleet.protocol.exhaustive import never
from subfleet.protocol.jobs import Job, Trainer, TrainResult
from subfleet.protocol.reasons import RefusalReason
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, TaskSubmodel, Train

_LOG = logging.getLogger(__name__)

_REASONS: Mapping[type[SubfleetError], RefusalReason] = MappingProxyType(
    {
        DataError: "data",
        NoRoomError: "disk",
        FileError: "program",
        LoadError: "runtime",
        DivergedError: "diverged",
        ProtocolError: "program",
    }
)
"""The reason to refuse a task by the type of its error; the first matching type counts."""
_OTHER_REASON: RefusalReason = "failed"

WorkT = TypeVar("WorkT", bound=Train | Calibrate | Score | Evaluate)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutput:
    """A finished training or calibration; the caller stores and removes its output file."""

    task_id: str
    result: TrainResult
    output_path: Path


Outcome = TrainingOutput | ScoringEnded | EvaluationEnded | WorkFailed
"""How a task ended."""


class Store(Protocol):
    """Where outputs are stored; `BlobStore` is the real one."""

    def take_file(self, path: Path) -> BlobRef:
        """Move a file into the store; see `BlobStore.take_file`."""
        ...


def store_output(outcome: Outcome | TrainingEnded, blobs: Store) -> Ended:
    """Store the output of a training as a blob, and remove its file; other outcomes are returned as they are."""
    if not isinstance(outcome, TrainingOutput):
        return outcome
    try:
        blob = blobs.take_file(outcome.output_path)
    except FileError as error:
        return WorkFailed(task_id=outcome.task_id, reason="disk", detail=str(error))
    except ProtocolError as error:
        return WorkFailed(task_id=outcome.task_id, reason="failed", detail=str(error))
    finally:
        outcome.output_path.unlink(missing_ok=True)
    return TrainingEnded(task_id=outcome.task_id, result=outcome.result, blob=blob)


class TaskWorker(Protocol):
    """Does one task at a time, concurrently with the agent's loop."""

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        """Start a task; `outcome` returns its end. Called only after the previous task ended.

        Args:
            task: the task.
            memory_limit_bytes: the most by which the process may grow for it.
            data_bytes: additional memory of the samples.
        """
        ...

    def stop(self) -> None:
        """Ask the task to stop at its next step."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the task, at most `timeout_s` seconds."""
        ...

    def outcome(self) -> Outcome | None:
        """Return the outcome of the task, once; None before its end."""
        ...


def locate_output(work_folder: Path, task_id: str) -> Path:
    """Locate a task's output file. An id may be any text of the server, so its digest is the file name."""
    name = hashlib.sha256(task_id.encode(errors="surrogatepass")).hexdigest()[:32]
    return work_folder / f"{name}.safetensors"


def discard(work_folder: Path, task_id: str) -> None:
    """Remove what a failed task may have written."""
    with suppress(OSError):
        locate_output(work_folder, task_id).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """The means to do tasks.

    Attributes:
        trainers: the trainers, by the target of their programs.
        blob_path: finds the file of a program or of weights; raises FileError if it is missing.
        work_folder: the folder for outputs.
        data: the data of `--data`.
        held_out: held-out data as `--held-out` names them; None without any.
        threads: number of threads of the runtime.
    """

    trainers: Mapping[str, Trainer]
    blob_path: Callable[[BlobRef], Path]
    work_folder: Path
    data: str
    held_out: str | None = None
    threads: int = 1

    @property
    def held_bytes(self) -> int:
        """Memory that trainers keep for their next job."""
        return sum(trainer.held_bytes for trainer in self.trainers.values())

    def do(self, task: Task, memory_limit_bytes: int, stopped: Callable[[], bool]) -> Outcome:
        """Do a task. Every exception of a trainer becomes a failure of the task.

        Args:
            task: the task.
            memory_limit_bytes: the most by which the process may grow.
            stopped: called between steps; True ends the task.
        """
        return self.guard(task, memory_limit_bytes, partial(self._run, task, memory_limit_bytes, stopped))

    def guard(self, task: Task, memory_limit_bytes: int, run: Callable[[], Outcome]) -> Outcome:
        """Call what does a task; every exception becomes a failure of the task, which leaves no output.

        Args:
            task: the task.
            memory_limit_bytes: the most by which the process may grow.
            run: does it.
        """
        outcome: Outcome | None = None
        try:
            outcome = _explain_problems(task, memory_limit_bytes, run)
        finally:
            if not isinstance(outcome, TrainingOutput):
                discard(self.work_folder, task.task_id)
        return outcome

    def _run(self, task: Task, memory_limit_bytes: int, stopped: Callable[[], bool]) -> Outcome:
        outcome: Outcome
        match task.work:
            case Train() as work:
                job = self.make_job(task, work, task.submodels[0], memory_limit_bytes, self.data)
                result = self._trainer(task.submodels[0]).train(job, stopped)
                outcome = finish_training(task, result, job.output_path)
            case Calibrate() as work:
                calibration = self.make_job(task, work, task.submodels[0], memory_limit_bytes, self.data)
                result = self._trainer(task.submodels[0]).calibrate(calibration, stopped)
                outcome = finish_training(task, result, calibration.output_path)
            case Score() as work:
                outcome = self._score(task, work, memory_limit_bytes, stopped)
            case Evaluate() as work:
                if self.held_out is None:
                    raise DataError(NO_HELD_OUT)
                evaluation = self.make_job(task, work, task.submodels[0], memory_limit_bytes, self.held_out)
                evaluated = self._trainer(task.submodels[0]).evaluate(evaluation, stopped)
                outcome = EvaluationEnded(task_id=task.task_id, result=evaluated)
            case Deploy():
                raise ProtocolError(f"task {task.task_id!r:.80} deploys models, which no trainer does")
            case _:
                never(task.work)
        return outcome

    def _score(self, task: Task, work: Score, memory_limit_bytes: int, stopped: Callable[[], bool]) -> ScoringEnded:
        """Score every candidate separately: a failure does not affect the others."""
        scores: list[CandidateScore] = []
        unloadable = 0
        for candidate in task.submodels:
            job = self.make_job(task, work, candidate, memory_limit_bytes, self.data)
            try:
                scores.append(_score_candidate(self._trainer(candidate), job, stopped))
            except LoadError as error:
                unloadable += 1
                scores.append(CandidateScore(score=None, reason=str(error)))
        if all(score.score is None for score in scores):
            kind = LoadError if unloadable == len(scores) else TrainingError
            raise kind(f"no candidate could be scored, the first because {scores[0].reason}")
        return ScoringEnded(task_id=task.task_id, scores=tuple(scores))

    def make_job(
        self, task: Task, work: WorkT, submodel: TaskSubmodel, memory_limit_bytes: int, data: str
    ) -> Job[WorkT]:
        """Make the job of a submodel of a task.

        Raises:
            ProtocolError: the submodel has no weights.
            FileError: a blob is missing.
        """
        if submodel.weights is None:
            raise ProtocolError(f"task {task.task_id!r:.80} has a submodel without weights")
        return Job(
            work=work,
            program_path=self.blob_path(submodel.program.blob),
            weights_path=self.blob_path(submodel.weights),
            frozen_path=None if submodel.frozen is None else self.blob_path(submodel.frozen),
            output_path=locate_output(self.work_folder, task.task_id),
            data=data,
            round=task.round,
            client_id=task.client_id,
            memory_limit_bytes=memory_limit_bytes,
            threads=self.threads,
            classes=task.classes,
            choices=submodel.architecture.choices,
            transform=task.transform,
        )

    def _trainer(self, submodel: TaskSubmodel) -> Trainer:
        return self.trainers[submodel.program.target]


def _explain_problems(task: Task, memory_limit_bytes: int, run: Callable[[], Outcome]) -> Outcome:
    try:
        return run()
    except MemoryError:
        detail = f"the system refused memory below the limit of {memory_limit_bytes} bytes"
        available_bytes = min(memory_limit_bytes, task.planned_peak_bytes) // 2
        return WorkFailed(task_id=task.task_id, reason="memory", detail=detail, available_bytes=available_bytes)
    except SubfleetError as error:
        return _explain_failure(task, error)
    except Exception as error:  # noqa: BLE001 - a trainer is a plug-in, and whatever it raises ends its task alone
        _LOG.warning("task %s: the trainer raised an unexpected error", task.task_id, exc_info=True)
        return WorkFailed(task_id=task.task_id, reason="failed", detail=f"{type(error).__name__}: {error}")


def finish_training(task: Task, result: TrainResult, path: Path) -> TrainingOutput:
    """Make the outcome of a training or calibration.

    Raises:
        DivergedError: its loss or accuracy is not finite.
    """
    if not (math.isfinite(result.loss) and math.isfinite(result.accuracy)):
        raise DivergedError(f"the loss is {result.loss} after {result.step_count} steps; try a smaller learning rate")
    return TrainingOutput(task_id=task.task_id, result=result, output_path=path)


def _score_candidate(trainer: Trainer, job: Job[Score], stopped: Callable[[], bool]) -> CandidateScore:
    try:
        score = trainer.score(job, stopped)
    except (SubfleetError, MemoryError) as error:
        if stopped() or isinstance(error, LoadError):
            raise
        return CandidateScore(score=None, reason=str(error) or type(error).__name__)
    if not math.isfinite(score):
        return CandidateScore(score=None, reason=f"the score is {score}")
    return CandidateScore(score=score)


def _explain_failure(task: Task, error: SubfleetError) -> WorkFailed:
    if isinstance(error, MemoryLimitError):
        # The limit in planned bytes: this program grew by more than its plan, and smaller ones will, too.
        excess = max(error.needed_bytes / max(task.planned_peak_bytes, 1), 1.0)
        available_bytes = int(error.limit_bytes / excess)
        return WorkFailed(task_id=task.task_id, reason="memory", detail=str(error), available_bytes=available_bytes)
    reason = next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), _OTHER_REASON)
    return WorkFailed(task_id=task.task_id, reason=reason, detail=str(error))
