"""Worker processes that do the tasks of all clients of a batch, with the same bits as the batch itself."""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from loky import ProcessPoolExecutor

from subfleet.device.process_limits import end_with_parent
from subfleet.edge_client.task_work import Outcome
from subfleet.emulation.batch.trainers import create_trainers
from subfleet.emulation.batch.work import ClientMeans, write_samples
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, RunError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.task import Task
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore

_LOG = logging.getLogger(__name__)
MOST_DEATHS = 3
"""How often worker processes may end while one outcome is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A task for a worker process.

    Attributes:
        task: the task.
        memory_limit_bytes: as in `TaskWork.do`.
        means: of its client.
        blobs: files of the task's programs and weights, by their digests.
    """

    task: Task
    memory_limit_bytes: int
    means: ClientMeans
    blobs: Mapping[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that it takes, each with a name of its own."""
        own = (self.means.data, self.means.held_out)
        return (*self.blobs.values(), *(path for path in own if path is not None))

    def move_to(self, folder: Path) -> "Order":
        """The same order where its files, with their names, are in another folder, which also receives outputs."""
        means = self.means
        held_out = None if means.held_out is None else folder / means.held_out.name
        return replace(
            self,
            means=replace(means, data=folder / means.data.name, held_out=held_out, folder=folder),
            blobs={sha256: folder / path.name for sha256, path in self.blobs.items()},
        )

    def do(self) -> Outcome:
        """Do the task, in any process."""
        work = self.means.open(_open_trainer(self.means.runtime), self._find_blob)
        return work.do(self.task, self.memory_limit_bytes, lambda: False)

    def _find_blob(self, blob: BlobRef) -> Path:
        if blob.sha256 not in self.blobs:
            raise FileError(f"blob {blob.sha256[:12]} is not in the server's store; it must be fetched again")
        return self.blobs[blob.sha256]


@cache  # a process keeps its loaded programs from task to task
def _open_trainer(runtime: str) -> Trainer:
    return create_trainers({runtime})[runtime]


@dataclass(slots=True, kw_only=True, eq=False)
class _Ordered:
    """An order whose outcome nobody has asked for, and what will be its outcome."""

    order: Order
    future: "Future[Outcome]"


class Pool(Protocol):
    """Does tasks elsewhere."""

    def begin(self, order: Order) -> Callable[[], Outcome]:
        """Begin a task; see `ClientWork.begin`.

        Raises:
            RunError: also by the returned function: whatever does tasks has ended too often.
        """
        ...


class WorkerPool:
    """See `Pool`: worker processes; a context manager that ends them.

    A worker that is killed costs time and nothing else: others do its tasks again.

    Args:
        count: of processes, 1 or more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor = self._start()
        self._waiting: list[_Ordered] = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)

    def begin(self, order: Order) -> Callable[[], Outcome]:
        """Begin a task; see `ClientWork.begin`."""
        try:
            future = self._executor.submit(order.do)
        except BrokenProcessPool:
            self._restart()
            future = self._executor.submit(order.do)
        ordered = _Ordered(order=order, future=future)
        self._waiting.append(ordered)
        return partial(self._wait, ordered)

    def _wait(self, ordered: _Ordered) -> Outcome:
        for _ in range(MOST_DEATHS):
            try:
                outcome = ordered.future.result()
            except BrokenProcessPool:
                _LOG.warning("a worker process has ended; its tasks are done again")
                self._restart()
            else:
                self._waiting.remove(ordered)
                return outcome
        task = ordered.order.task
        raise RunError(
            f"worker processes have ended {MOST_DEATHS} times during task {task.task_id!r} of {task.client_id}; free "
            "some memory, or lower workers"
        )

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            max_workers=self._count,
            initializer=_prepare,
            initargs=(os.getpid(),),
            env={"OMP_NUM_THREADS": "1"},  # each runtime is told its threads; others would share the processors
        )

    def _restart(self) -> None:
        """Start other processes, and order again what nobody has done."""
        self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = self._start()
        for ordered in self._waiting:
            if not ordered.future.done() or ordered.future.exception() is not None:
                ordered.future = self._executor.submit(ordered.order.do)


def _prepare(parent_id: int) -> None:
    """Leave Ctrl-C to the batch, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkElsewhere:
    """Does the tasks of a client in a pool; see `ClientWork`.

    Attributes:
        pool: does the tasks.
        means: of the client.
        samples: of the client by their files, which are written before its first task.
        blobs: the store of the server.
    """

    pool: Pool
    means: ClientMeans
    samples: Mapping[Path, Dataset]
    blobs: BlobStore

    def expect(self, task: Task) -> None:
        """See `ClientWork.expect`."""

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], Outcome]:
        """See `ClientWork.begin`."""
        write_samples(self.samples)
        found = {blob.sha256: self.blobs.path(blob) for blob in task.blobs if self.blobs.has(blob)}
        return self.pool.begin(Order(task=task, memory_limit_bytes=memory_limit_bytes, means=self.means, blobs=found))
