"""The worker process of an agent: it loads the runtime, reads the data, and does one task at a time.

It reads lines from its agent and answers with lines (`worker_messages`). It ends when its agent ends, even during a
step, and ignores the signals that stop an agent.
"""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import BinaryIO

from subfleet.agent.outcomes import WorkFailed
from subfleet.device.control_groups import OwnGroups
from subfleet.device.process_limits import end_with_parent, limit_growth, offer_to_the_kernel, use_one_heap
from subfleet.device.runtimes import CPU, choose_trainer
from subfleet.edge_client.failures import LOG_FORM, explain_error
from subfleet.edge_client.task_work import TaskWork, discard
from subfleet.edge_client.worker_messages import (
    Opened,
    Order,
    Report,
    StartFailed,
    TaskEnded,
    Workplace,
    decode_order,
    decode_report,
    encode_line,
)
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.logs import log_to_standard_error

_LOG = logging.getLogger(__name__)

_SPARE_BYTES = 256 * 2**20
"""Growth of the process besides its task: stacks, caches and fragments that no plan counts."""
_BESIDE_BYTES = 8 * 2**20
"""The same where the limit binds: what was found enough for programs at their plan, with 4 to 6 of them to spare."""
_STACK_BYTES = 16 * 2**20
"""Memory of each thread of the runtime, including the C library's reserve for it."""


def main(arguments: Sequence[str]) -> None:
    """Do tasks until the agent closes this process's standard input, which ends it at once.

    Args:
        arguments: the agent's process id.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(arguments[0]))
    offer_to_the_kernel()
    use_one_heap()
    # Output of libraries must not mix with the reports.
    channel = os.dup(1)
    os.dup2(2, 1)

    def tell(report: Report) -> None:
        line = encode_line(report)
        while line:
            line = line[os.write(channel, line) :]

    # Not `sys.stdin`, which the interpreter closes at its end while a thread may still read it.
    source = os.fdopen(os.dup(0), "rb")
    workplace = Workplace.of_line(source.readline())
    log_to_standard_error(workplace.log_level, form=LOG_FORM)
    groups = OwnGroups(workplace.groups)
    groups.join()
    orders = _Orders(source)
    try:
        work, opened = _open(workplace)
    except Exception as error:  # noqa: BLE001 - the rim: whatever it is, the agent says it
        _LOG.debug("no task can be done", exc_info=True)
        code, text = explain_error(error)
        tell(StartFailed(code=int(code), text=text))
        return
    tell(opened)
    while True:
        order = orders.next()
        with _limit_memory(workplace, groups, order, work.held_bytes):
            outcome = work.do(order.task, order.memory_limit_bytes, orders.make_stop_check(order))
        tell(_check_report(TaskEnded(outcome=outcome, held_bytes=work.held_bytes), workplace.work_folder))


def _open(workplace: Workplace) -> tuple[TaskWork, Opened]:
    trainer, summary = choose_trainer(workplace.runtimes, workplace.data, workplace.provider)
    held_out = None if workplace.held_out is None else trainer.describe(workplace.held_out)
    work = TaskWork(
        trainers={trainer.target: trainer},
        blob_path=partial(_find_blob, workplace.blobs),
        work_folder=workplace.work_folder,
        data=workplace.data,
        held_out=workplace.held_out,
        threads=workplace.threads,
    )
    return work, Opened(target=trainer.target, data=summary, held_out=held_out)


def _check_report(report: TaskEnded, work_folder: Path) -> TaskEnded:
    """Replace an invalid report: trainers are plug-ins and may return anything."""
    try:
        decode_report(encode_line(report), work_folder)
    except (TypeError, ValueError, ProtocolError) as error:
        discard(work_folder, report.outcome.task_id)
        detail = f"the trainer's result is invalid: {error}"
        failed = WorkFailed(task_id=report.outcome.task_id, reason="failed", detail=detail)
        return TaskEnded(outcome=failed, held_bytes=0)
    return report


def _find_blob(folder: Path, blob: BlobRef) -> Path:
    """Find the file of a fetched blob; only the agent writes to that folder."""
    path = folder / blob.sha256
    try:
        if path.stat().st_size == blob.size_bytes:
            return path
    except OSError:
        pass
    raise FileError(f"blob {blob.sha256[:12]} is not in {str(folder)!r}; fetch it first")


def _limit_memory(
    workplace: Workplace, groups: OwnGroups, order: Order, held_bytes: int
) -> AbstractContextManager[None]:
    """Let the system limit memory during a task: the watch only checks it between steps.

    Nothing is limited with a GPU, as its driver maps large address ranges that take no memory.
    """
    if workplace.provider != CPU:
        return nullcontext()
    # Samples are read and transformed in addition to the plan.
    growth_bytes = order.memory_limit_bytes + 2 * order.data_bytes
    if not workplace.binds_memory:
        return limit_growth(growth_bytes + _SPARE_BYTES + workplace.threads * _STACK_BYTES)
    # What is kept from the task before is part of what this one may take.
    growth_bytes = max(growth_bytes - held_bytes, 0) + _BESIDE_BYTES
    if groups.limits_memory:
        return groups.limit_growth(growth_bytes)
    return limit_growth(growth_bytes + (workplace.threads - 1) * _STACK_BYTES)


class _Orders:
    """The agent's orders, read in a separate thread, as a running task may be stopped.

    Args:
        source: the agent's lines; they end when the agent ends.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._stops: set[str] = set()
        threading.Thread(target=self._read, name="subfleet-orders", daemon=True).start()

    def next(self) -> Order:
        """Wait for the next task."""
        return self._orders.get()

    def make_stop_check(self, order: Order) -> Callable[[], bool]:
        """Make a function that tells whether a task was stopped."""
        return lambda: order.task.task_id in self._stops

    def _read(self) -> None:
        for line in self._source:
            order = decode_order(line)
            if isinstance(order, Order):
                self._stops.discard(order.task.task_id)  # a stopped task may be repeated
                self._orders.put(order)
            else:
                self._stops.add(order.task_id)
        # The agent has ended: nobody needs the current task, and a step may hang.
        os._exit(0)
