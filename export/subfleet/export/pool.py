"""Exports in worker processes: one export per request, results on disk; a crash or a hang fails one request only."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.jobs import MAX_LINE_BYTES, TAKEN_LINE, ExportJob
from subfleet.export.requests import AnyRequest
from subfleet.protocol.errors import ExportError, ProtocolError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.scratch import make_locked_folder

Waiting = tuple[ExportJob, "Future[Path]"]


class _WaitingJobs:
    """A thread-safe queue; a taker may wait for jobs of a minimum age, so that it only gets neglected ones."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Waiting]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: ExportJob, future: "Future[Path]") -> None:
        """Append a job."""
        with self._changed:
            self._waiting.append((time.monotonic(), (job, future)))
            self._changed.notify_all()

    def close(self) -> None:
        """Release the waiting jobs at once; after the last one, `take` returns None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, *, after_s: float = 0.0) -> Waiting | None:
        """Take the oldest job once it has waited for `after_s`, 0 or more; None if the queue is closed and empty."""
        with self._changed:
            while True:
                left_s = None
                if self._waiting:
                    left_s = after_s - (time.monotonic() - self._waiting[0][0])
                    if left_s <= 0 or self._closed:
                        return self._waiting.popleft()[1]
                elif self._closed:
                    return None
                self._changed.wait(left_s)


logger = logging.getLogger(__name__)

START_S = 10.0
"""Roughly the time that a worker takes to start; no other worker is started for jobs that have waited for less."""


class _Process:
    """One worker process with its pipes."""

    def __init__(self, log_path: Path) -> None:
        self._folder, self._held = make_locked_folder(Path(tempfile.gettempdir()))
        with log_path.open("wb") as log:  # the log of this process only: it does not grow forever
            # Its own session: Ctrl-C in the terminal must only reach the process that started the pool.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "subfleet.export.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._folder)},
                start_new_session=True,
            )

    @property
    def process_id(self) -> int:
        return self._popen.pid

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def exchange(self, request: bytes) -> bytes | None:
        """Send one line and read the answer; None if the process ended before it received the request.

        An answer without a line break was cut off by the end of the process.
        """
        if self._popen.stdin is None or self._popen.stdout is None:
            return None
        try:
            self._popen.stdin.write(request + b"\n")
            self._popen.stdin.flush()
        except OSError:
            return None
        return self._popen.stdout.readline() if self._popen.stdout.readline() == TAKEN_LINE else None

    def kill(self) -> None:
        self._popen.kill()

    def discard(self) -> None:
        """End the process and close its pipes."""
        self._popen.kill()
        self._popen.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._held)
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):  # nobody reads what was not flushed
                if pipe is not None:
                    pipe.close()


class _Worker:
    """A worker process, restarted whenever it has ended."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._process: _Process | None = None
        self._closed = False
        self._lock = threading.RLock()

    @property
    def process_id(self) -> int:
        """The id of the running process; 0 if none is running."""
        return 0 if self._process is None else self._process.process_id

    def start(self) -> "_Process":
        """Return the running process; start one if there is none."""
        with self._lock:
            if self._closed:
                raise ExportError("the export pool is closed; open another one")
            if self._process is None or self._process.has_ended():
                self.discard()
                self._process = _Process(self._log_path)
            return self._process

    def run(self, job: ExportJob, timeout_s: float) -> None:
        """Run one job.

        Raises:
            ExportError: the job failed, the process ended, or it took too long.
        """
        deadline = time.monotonic() + timeout_s
        line = self._exchange(job, deadline)
        if line is None:  # it had ended while idle; the job never began
            line = self._exchange(job, deadline)
        if line is None or not line.endswith(b"\n"):
            if time.monotonic() >= deadline:
                raise ExportError(f"the export took longer than {timeout_s:g} s; allow more time or a smaller submodel")
            raise ExportError(f"the export process ended before it answered; see {self._log_path}")
        try:
            failure = from_plain(str, parse_json(line, max_bytes=MAX_LINE_BYTES))
        except ProtocolError as error:
            raise ExportError(f"the export process gave no valid answer: {error}; see {self._log_path}") from error
        if failure:
            raise ExportError(failure)

    def _exchange(self, job: ExportJob, deadline_s: float) -> bytes | None:
        """Send a job and wait for its answer; None if the process ended before it received the job."""
        process = self.start()
        timer = threading.Timer(max(deadline_s - time.monotonic(), 0), process.kill)
        timer.start()
        try:
            answer = process.exchange(canonical_json(job))
        finally:
            timer.cancel()
        if answer is None or not answer.endswith(b"\n"):
            self.discard()
        return answer

    def close(self) -> None:
        """End the process for good."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def discard(self) -> None:
        """End the process; the next job starts another one."""
        with self._lock:
            if self._process is not None:
                self._process.discard()
                self._process = None


class ExportPool:
    """Worker processes that export, and the cache of their results.

    If the cache is empty, the first worker starts at once and imports its tools; otherwise it starts with the first
    request that the cache cannot answer. Others start when jobs wait for longer than a start takes, because there are
    many or because a worker is slow or hangs. Results are cached by content id, so a request is exported only once;
    simultaneous identical requests share one future. Close the pool, or use it as a context manager.
    """

    def __init__(self, cache: CacheFolder, *, workers: int = 2, timeout_s: float = 300.0) -> None:
        """Open the cache; start the first worker if the cache is empty.

        Args:
            cache: the cache folder; if it exceeds its limit, the least recently used results are removed.
            workers: the largest number of processes, 1 or more.
            timeout_s: the time limit of one export, above 0.

        Raises:
            FileError: the folder cannot be created.
        """
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"workers is {workers} and timeout_s {timeout_s}, but they must be 1 or more and above 0")
        self._cache = ExportCache(cache)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._pending: dict[str, Future[Path]] = {}
        self._jobs = _WaitingJobs()
        self._workers = tuple(_Worker(cache.path / f"worker-{number}.log") for number in range(workers))
        self._threads = tuple(
            threading.Thread(target=self._serve, args=(worker, number), daemon=True, name=f"export-{number}")
            for number, worker in enumerate(self._workers)
        )
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "ExportPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The workers' process ids; 0 for a worker that is not running."""
        return tuple(worker.process_id for worker in self._workers)

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """Request a packed training or evaluation program, an inference model, or cost estimates of all submodels.

        `subfleet.protocol.programs.decode_program` reads programs, `MemoryEstimates.unpack` estimates. The future
        raises ExportError if the request cannot be exported.

        Args:
            request: what to export.
            weights_path: for an inference model, a safetensors file with the submodel's own tensors, which the request
                names by their content id; it must exist until the future is done.
            samples_from: for an 8-bit model, the data set that the request names by its content id.
        """
        path = self._cache.path(request)
        with self._lock:
            if self._closed:
                raise ExportError("the export pool is closed; open another one")
            shared = self._pending.get(path.name)
            if shared is not None:
                return shared
            future: Future[Path] = Future()
            future.set_running_or_notify_cancel()  # several callers may share it, so none can cancel it
            if self._cache.find(request) is not None:
                future.set_result(path)
                return future
            self._pending[path.name] = future
            job = ExportJob(
                request=request,
                result_path=str(path.resolve()),
                weights_path="" if weights_path is None else str(weights_path.resolve()),
                samples_from=samples_from,
            )
            self._jobs.put(job, future)
            return future

    def close(self) -> None:
        """End the workers. Running and waiting exports fail with ExportError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.close()
        self._jobs.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: _Worker, number: int) -> None:
        with contextlib.suppress(ExportError, OSError):  # the first job will report the same error
            if number == 0 and self._cache.is_empty():
                worker.start()
        while (item := self._jobs.take(after_s=0.0 if worker.process_id else number * START_S)) is not None:
            job, future = item
            error: Exception | None = None
            try:
                worker.run(job, self._timeout_s)
            except ExportError as failure:
                error = failure
            except OSError as failure:
                error = ExportError(f"the export process cannot be started: {failure}; free some memory and try again")
            path = self._cache.path(job.request)
            with self._lock:
                self._pending.pop(path.name, None)
            if error is None:
                self._cache.find(job.request)  # marks it as used
                self._cache.trim()
                future.set_result(path)
            else:
                logger.warning("export of %s failed: %s", job.request.file_name, error)
                future.set_exception(error)
        worker.discard()
