"""A worker process: a program that crashes or hangs affects only this process, not the agent.

The process is reused for further tasks, so a runtime is loaded once. If it dies or hangs, its task fails and another
process is started.
"""

import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from subfleet.agent.outcomes import WorkFailed
from subfleet.edge_client.task_work import Outcome, discard
from subfleet.edge_client.worker_messages import (
    MAX_LINE_BYTES,
    Opened,
    Order,
    StartFailed,
    Stop,
    TaskEnded,
    Workplace,
    decode_report,
    encode_line,
)
from subfleet.protocol.children import make_child_command
from subfleet.protocol.errors import BrokenError, ProtocolError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.messages import RefusalReason, Task

_LOG = logging.getLogger(__name__)

STOP_S = 10.0
"""How long a task may go on after it was stopped: a step on a slow board takes seconds."""
_CLOSE_S = 1.0
_CHILD = "subfleet.edge_client.worker_child"
_END = b""


class WorkerProcess:
    """Does tasks in a child process; a context manager that ends it.

    Args:
        place: the means to do tasks.
        stop_s: how long a task may go on after it was stopped.
        clock: seconds, monotonic.

    Raises:
        SubfleetError: the process cannot do any task: no runtime works, or the data cannot be used.
    """

    def __init__(
        self, workplace: Workplace, *, stop_s: float = STOP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workplace = workplace
        self._stop_s = stop_s
        self._clock = clock
        self._held_bytes = 0
        self._task: Task | None = None
        self._memory_limit_bytes = 0
        self._kill_at_s: float | None = None
        self._ready: Outcome | None = None
        self._problem: StartFailed | None = None
        self._child = _Child(workplace)
        try:
            self.opened = self._open()
        except BaseException:
            self._child.close()
            raise

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()

    @property
    def process_id(self) -> int:
        """Id of the worker process."""
        return self._child.process_id

    @property
    def held_bytes(self) -> int:
        """Memory that the process keeps for its next task."""
        return self._held_bytes

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        """See `TaskWorker.start`."""
        if self._child.has_ended():
            self._renew()
        self._task, self._memory_limit_bytes = task, memory_limit_bytes
        self._kill_at_s = None
        self._child.send(encode_line(Order(task=task, memory_limit_bytes=memory_limit_bytes, data_bytes=data_bytes)))

    def stop(self) -> None:
        """See `TaskWorker.stop`; a process that does not stop is killed."""
        if self._task is not None and self._kill_at_s is None:
            self._kill_at_s = self._clock() + self._stop_s
            self._child.send(encode_line(Stop(task_id=self._task.task_id)))

    def join(self, timeout_s: float) -> None:
        """See `TaskWorker.join`."""
        until_s = self._clock() + timeout_s
        while self._task is not None and (left_s := until_s - self._clock()) > 0:
            self._ready = self._poll(min(left_s, 0.1))

    def outcome(self) -> Outcome | None:
        """See `TaskWorker.outcome`."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        return self._poll(0.0)

    # --- reports of the process ---

    def _open(self) -> Opened:
        """Wait until the process has loaded runtimes and data."""
        line = self._child.line(None)
        report = None if line in (None, _END) else decode_report(line, self._workplace.work_folder)
        if isinstance(report, Opened):
            return report
        if isinstance(report, StartFailed):
            raise report.error()
        raise BrokenError(f"this device's worker process {self._child.end()} before it was ready; --verbose shows more")

    def _poll(self, timeout_s: float) -> Outcome | None:
        """Return the outcome, if any: from a report, from the end of the process, or after killing it."""
        line = self._child.line(timeout_s)
        if line is None:
            if self._kill_at_s is None or self._clock() < self._kill_at_s:
                return None
            return self._fail_task(f"did not stop within {self._stop_s:g} s and was ended", "failed")
        if line == _END:
            return self._handle_exit()
        try:
            report = decode_report(line, self._workplace.work_folder)
        except ProtocolError as error:
            # This line may have been the task's outcome, so the process must be ended.
            return self._fail_task(f"sent an unreadable report ({error})", "failed")
        if isinstance(report, TaskEnded):
            return self._accept(report)
        self._problem = report if isinstance(report, StartFailed) else None
        return None

    def _accept(self, report: TaskEnded) -> Outcome | None:
        self._held_bytes = report.held_bytes
        if self._task is None or report.outcome.task_id != self._task.task_id:
            _LOG.warning("ignored the result of a task that is not in progress")
            return None
        self._task, self._kill_at_s = None, None
        return report.outcome

    def _handle_exit(self) -> Outcome | None:
        """Handle the end of the process; a SIGKILL by the kernel means that memory was short."""
        if self._problem is not None:
            reason: RefusalReason = "data" if self._problem.code == ExitCode.DATA else "runtime"
            return self._fail_task(f"ended: {self._problem.text}", reason)
        return self._fail_task(self._child.end(), "memory" if self._child.was_killed() else "failed")

    def _fail_task(self, how: str, reason: RefusalReason) -> Outcome | None:
        task, self._task, self._kill_at_s = self._task, None, None
        if task is None:
            _LOG.warning("the worker process %s; the next task starts another one", how)
            self._child.close()
            self._held_bytes = 0
            return None
        discard(self._workplace.work_folder, task.task_id)
        self._renew()
        available_bytes = min(self._memory_limit_bytes, task.planned_peak_bytes) // 2 if reason == "memory" else None
        detail = f"the worker process {how}"
        return WorkFailed(
            task_id=task.task_id,
            reason=reason,
            detail=detail,
            available_bytes=available_bytes,
            killed=reason == "memory",
        )

    def _renew(self) -> None:
        self._child.close()
        self._held_bytes, self._problem = 0, None
        self._child = _Child(self._workplace)


class _Child:
    """One run of the worker process, with its pipes. It shares this process's standard error."""

    def __init__(self, workplace: Workplace) -> None:
        # A session of its own: Ctrl-C at the terminal is for the agent.
        self._popen = subprocess.Popen(
            make_child_command(_CHILD, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="subfleet-worker", daemon=True)
        self._reader.start()
        self.send(workplace.line())

    @property
    def process_id(self) -> int:
        return self._popen.pid

    def send(self, line: bytes) -> None:
        """Write a line; does nothing if the process has ended, which `line` reports."""
        with suppress(OSError, ValueError):
            if self._popen.stdin is not None:
                self._popen.stdin.write(line)
                self._popen.stdin.flush()

    def line(self, timeout_s: float | None) -> bytes | None:
        """Return the next line, an empty one at the end of the process, or None after the timeout."""
        try:
            return self._lines.get(timeout=timeout_s) if timeout_s != 0 else self._lines.get_nowait()
        except queue.Empty:
            return None

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def was_killed(self) -> bool:
        """Whether SIGKILL ended the process; waits for its end."""
        return self._popen.wait() == -signal.SIGKILL

    def end(self) -> str:
        """Describe how the process ended; waits for its end."""
        code = self._popen.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def close(self) -> None:
        """Kill the process at once."""
        self._popen.kill()
        self._popen.wait()
        # A process that a data set's code forked may keep the other end of the pipe open.
        self._reader.join(_CLOSE_S)
        with suppress(OSError):  # nobody reads unflushed data
            if self._popen.stdin is not None:
                self._popen.stdin.close()
            if self._popen.stdout is not None and not self._reader.is_alive():
                self._popen.stdout.close()

    def _read(self) -> None:
        while self._popen.stdout is not None and (line := self._popen.stdout.readline(MAX_LINE_BYTES + 1)):
            self._lines.put(line)
        self._lines.put(_END)
