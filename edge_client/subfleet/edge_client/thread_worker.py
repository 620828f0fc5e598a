"""A worker in a thread of this process, for fleets in one process and programs that embed an agent."""

import queue
import threading
from collections.abc import Mapping
from pathlib import Path

from subfleet.agent.outcomes import WorkFailed
from subfleet.edge_client.task_work import Outcome, TaskWork
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.task import Task
from subfleet.transport.blob_store import BlobStore


class TrainingWorker:
    """Runs trainers in this process. A step that hangs cannot be stopped; see `WorkerProcess`.

    Args:
        trainers: the trainers, by the target of their programs.
        blobs: the store of programs and weights.
        work_folder: the folder for outputs.
        data: the data of `--data`.
        held_out: held-out data as `--held-out` names them; None without any.
        threads: number of threads of the runtime.
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
        self._work = TaskWork(
            trainers=trainers,
            blob_path=blobs.path,
            work_folder=work_folder,
            data=data,
            held_out=held_out,
            threads=threads,
        )
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        """See `TaskWorker.start`; the data are in this process anyway."""
        del data_bytes
        self._stop.clear()
        # A daemon, so that a runtime that hangs cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(task, memory_limit_bytes), name="subfleet-training", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """See `TaskWorker.stop`."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """See `TaskWorker.join`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def outcome(self) -> Outcome | None:
        """See `TaskWorker.outcome`."""
        try:
            return self._outcomes.get_nowait()
        except queue.Empty:
            return None

    def _run(self, task: Task, memory_limit_bytes: int) -> None:
        outcome: Outcome = WorkFailed(
            task_id=task.task_id, reason="failed", detail="the training thread ended without a result"
        )
        try:
            outcome = self._work.do(task, memory_limit_bytes, self._stop.is_set)
        finally:
            self._outcomes.put(outcome)
