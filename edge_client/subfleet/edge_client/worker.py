"""Trains, scores and evaluates in a thread of its own, one task at a time, so that heartbeats go on."""

import hashlib
import logging
import math
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.agent.events import EvaluationEnded, Scored, WorkFailed
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
from subfleet.protocol.messages import RefusalReason, Task
from subfleet.protocol.programs import EvaluateJob, ProgramRef, ScoreJob, Trainer, TrainJob, TrainResult
from subfleet.protocol.training import TrainingSettings
from subfleet.transport.blob_store import BlobStore

__all__ = ["Finished", "Outcome", "TrainingWorker"]

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
"""By the first kind that an error is one of."""
_OTHER_REASON: RefusalReason = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A training ended well; its output file is the caller's to store and remove."""

    task_id: str
    result: TrainResult
    output_path: Path


Outcome = Finished | Scored | EvaluationEnded | WorkFailed
"""How the worker ended a task."""


class TrainingWorker:
    """Runs trainers.

    Args:
        trainers: by the target of the programs that they run.
        blobs: where programs and weights are.
        work_folder: where outputs are written.
        data: what `--data` names.
        held_out: what `--held-out` names; None where there is none.
        threads: of the runtime.
    """

    def __init__(
        self,
        trainers: Mapping[str, Trainer],
        *,
        blobs: BlobStore,
        work_folder: Path,
        data: str,
        held_out: str | None = None,
        threads: int = 1,
    ) -> None:
        self._trainers = trainers
        self._blobs = blobs
        self._work_folder = work_folder
        self._data = data
        self._held_out = held_out
        self._threads = threads
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, task: Task, memory_limit_bytes: int) -> None:
        """Begin a task; `outcome` gives the end of it. Called only when the last one has ended."""
        self._stop.clear()
        # A daemon, so that a runtime that hangs cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(task, memory_limit_bytes), name="subfleet-training", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ask the training to end at its next step."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the training to end, at most so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def outcome(self) -> Outcome | None:
        """How the task ended, once; None before."""
        try:
            return self._outcomes.get_nowait()
        except queue.Empty:
            return None

    def _run(self, task: Task, memory_limit_bytes: int) -> None:
        outcome: Outcome = WorkFailed(
            task_id=task.task_id, reason="failed", detail="the training thread ended without a result"
        )
        try:
            outcome = self._done(task, memory_limit_bytes)
        finally:
            if isinstance(outcome, WorkFailed):
                with suppress(OSError):  # a trainer may fail after it wrote: nobody will come for that file
                    self._output_path(task).unlink(missing_ok=True)
            self._outcomes.put(outcome)

    def _done(self, task: Task, memory_limit_bytes: int) -> Outcome:
        try:
            match task.work:
                case "score":
                    return self._score(task, memory_limit_bytes)
                case "evaluate":
                    return self._evaluate(task, memory_limit_bytes)
                case _:
                    return self._train(task, memory_limit_bytes)
        except MemoryError:
            detail = f"the system refused memory below the limit of {memory_limit_bytes} bytes"
            available_bytes = min(memory_limit_bytes, task.planned_peak_bytes) // 2
            return WorkFailed(task_id=task.task_id, reason="memory", detail=detail, available_bytes=available_bytes)
        except SubfleetError as error:
            return _failure(task, error)
        except Exception as error:  # noqa: BLE001 - a trainer is a plug-in, and whatever it raises ends its task alone
            _LOG.warning("task %s: the trainer raised an error of its own", task.task_id, exc_info=True)
            return WorkFailed(task_id=task.task_id, reason="failed", detail=f"{type(error).__name__}: {error}")

    def _train(self, task: Task, memory_limit_bytes: int) -> Finished:
        job = self._job(task, memory_limit_bytes)
        result = self._trainers[task.programs[0].target].train(job, self._stop.is_set)
        return Finished(task_id=task.task_id, result=result, output_path=job.output_path)

    def _score(self, task: Task, memory_limit_bytes: int) -> Scored:
        """Every candidate by itself: one that cannot be scored takes nothing from the others."""
        if task.scoring is None or task.training is None:
            raise ProtocolError(f"task {task.task_id!r:.80} names no candidates or no settings, but must to be scored")
        found: list[CandidateScore] = []
        unloadable = 0
        for program, weights in zip(task.programs, task.scoring.weights, strict=True):
            job = ScoreJob(
                program_path=self._blobs.path(program.blob),
                weights_path=self._blobs.path(weights),
                data=self._data,
                settings=task.training,
                batches=task.scoring.batches,
                client_id=task.client_id,
                memory_limit_bytes=memory_limit_bytes,
                threads=self._threads,
                classes=task.classes,
                transform=task.transform,
            )
            try:
                found.append(self._score_of(program, job))
            except LoadError as error:
                unloadable += 1
                found.append(CandidateScore(score=None, reason=str(error)))
        if all(one.score is None for one in found):
            kind = LoadError if unloadable == len(found) else TrainingError
            raise kind(f"no candidate could be scored, the first because {found[0].reason}")
        return Scored(task_id=task.task_id, scores=tuple(found))

    def _score_of(self, program: ProgramRef, job: ScoreJob) -> CandidateScore:
        try:
            score = self._trainers[program.target].score(job, self._stop.is_set)
        except (SubfleetError, MemoryError) as error:
            if self._stop.is_set() or isinstance(error, LoadError):
                raise
            return CandidateScore(score=None, reason=str(error) or type(error).__name__)
        if not math.isfinite(score):
            return CandidateScore(score=None, reason=f"the score is {score}")
        return CandidateScore(score=score)

    def _evaluate(self, task: Task, memory_limit_bytes: int) -> EvaluationEnded:
        if task.weights is None or task.evaluation is None:
            raise ProtocolError(f"task {task.task_id!r:.80} names no weights or no settings, but must to be evaluated")
        if self._held_out is None:
            raise DataError(NO_HELD_OUT)
        job = EvaluateJob(
            program_path=self._blobs.path(task.programs[0].blob),
            weights_path=self._blobs.path(task.weights),
            data=self._held_out,
            settings=task.evaluation,
            memory_limit_bytes=memory_limit_bytes,
            threads=self._threads,
            classes=task.classes,
            choices=task.spec.choices,
            transform=task.transform,
        )
        result = self._trainers[task.programs[0].target].evaluate(job, self._stop.is_set)
        return EvaluationEnded(task_id=task.task_id, result=result)

    def _job(self, task: Task, memory_limit_bytes: int) -> TrainJob:
        weights: BlobRef | None = task.weights
        settings: TrainingSettings | None = task.training
        if weights is None or settings is None:
            raise ProtocolError(f"task {task.task_id!r:.80} names no weights or no settings, but must to be trained")
        return TrainJob(
            program_path=self._blobs.path(task.programs[0].blob),
            weights_path=self._blobs.path(weights),
            output_path=self._output_path(task),
            data=self._data,
            settings=settings,
            round=task.round,
            client_id=task.client_id,
            memory_limit_bytes=memory_limit_bytes,
            threads=self._threads,
            update_codec=task.update_codec,
            calibration=task.calibration,
            classes=task.classes,
            sends=task.sends,
            paths=task.paths,
            choices=task.spec.choices,
            transform=task.transform,
        )

    def _output_path(self, task: Task) -> Path:
        # A task's id is any text of the server's; its digest is a safe name for a file.
        name = hashlib.sha256(task.task_id.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._work_folder / f"{name}.safetensors"


def _failure(task: Task, error: SubfleetError) -> WorkFailed:
    if isinstance(error, MemoryLimitError):
        # The limit in terms of planned bytes: this program grew by more than its plan, and a smaller one will, too.
        excess = max(error.needed_bytes / max(task.planned_peak_bytes, 1), 1.0)
        available_bytes = int(error.limit_bytes / excess)
        return WorkFailed(task_id=task.task_id, reason="memory", detail=str(error), available_bytes=available_bytes)
    reason = next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), _OTHER_REASON)
    return WorkFailed(task_id=task.task_id, reason=reason, detail=str(error))
