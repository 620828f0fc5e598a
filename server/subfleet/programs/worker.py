"""Work beside the loop: a worker begins requests, and returns `RequestDone` or `RequestFailed` when they have ended.

Each request is handled by a coroutine in the thread of the loop, so that it needs no locks. With `wait_for`, the
coroutine waits for a file of the exporter or for a function in one of the `Threads`.
"""

import logging
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from subfleet.elastic.model_state import ModelState
from subfleet.protocol.errors import FileError, SubfleetError
from subfleet.protocol.loading import find_cause
from subfleet.rounds.signals import Request, RequestDone, RequestFailed
from subfleet.rounds.state import RunState

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8
"""Requests that advance in one step of the loop: each may write a blob."""
_MOST_CHARACTERS = 400  # of a reason in tables

T = TypeVar("T")
Steps = Coroutine["Future[Any]", None, T]
"""A coroutine that handles a request; it yields the futures that it waits for."""


@types.coroutine
def wait_for(future: "Future[T]") -> Generator["Future[T]", None, T]:
    """Wait for a future in a coroutine of a `Worker`; returns its result, or raises its error."""
    yield future
    return future.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at the time of a request; immutable."""

    state: RunState
    model: ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """How a kind of request is handled.

    Attributes:
        work: the coroutine of a request in a run.
        failure: the first words of the reason if it fails.
        reasons: errors with a complete text, which alone is the reason.
        needs_disk: whether a FileError is the fault of the server's disk, see `RequestFailed.by_disk`.
    """

    work: Callable[[Any, Snapshot], Steps[Any]]
    failure: str
    reasons: tuple[type[SubfleetError], ...] = ()
    needs_disk: bool = False


class Threads:
    """A thread for each lane: functions of one lane run in order, and lanes are independent."""

    def __init__(self) -> None:
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._futures = set["Future[Any]"]()

    def submit(self, lane: str, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run a function in the thread of a lane."""
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"subfleet-{lane}")
        future = self._lanes[lane].submit(function, *arguments)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def runs(self, future: "Future[Any]") -> bool:
        """Whether a future belongs to an unfinished function of these threads, and not to the exporter."""
        return future in self._futures

    def work(
        self, lane: str, function: Callable[[Any, RunState, ModelState], T]
    ) -> Callable[[Any, Snapshot], Steps[T]]:
        """The coroutine of a request that one function handles in the thread of a lane."""

        async def work(request: Any, run: Snapshot) -> T:
            return await wait_for(self.submit(lane, function, request, run.state, run.model))

        return work

    def close(self) -> None:
        """Wait for running functions, and cancel the others."""
        for pool in self._lanes.values():
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class _Job:
    """An open request.

    Attributes:
        waits_for: the future that its coroutine waits for; None once it has ended.
        outcome: None until it has ended.
    """

    request: Request
    steps: Steps[RequestDone | RequestFailed]
    waits_for: "Future[Any] | None" = None
    outcome: RequestDone | RequestFailed | None = None

    def go_on(self) -> None:
        """Take the next step."""
        try:
            self.waits_for = self.steps.send(None)
        except StopIteration as ended:
            self.waits_for, self.outcome = None, ended.value


class Worker:
    """Handles the requests of a run beside its loop. Every method belongs to the thread of the loop.

    Args:
        duties: the handler of each kind of request.
        threads: of the coroutines; they are closed with the worker.
    """

    def __init__(self, duties: Mapping[type, Handler], threads: Threads) -> None:
        self._duties = duties
        self._threads = threads
        self._jobs: list[_Job] = []

    @property
    def requests(self) -> tuple[Request, ...]:
        """The open requests."""
        return tuple(job.request for job in self._jobs)

    @property
    def more(self) -> bool:
        """Whether the next call of `events` has something to do."""
        return any(job.waits_for is None or job.waits_for.done() for job in self._jobs)

    def begin(self, request: Request, run: Snapshot) -> None:
        """Begin a request in a run, unless it is open already."""
        if any(job.request == request for job in self._jobs):
            return
        job = _Job(request=request, steps=_handle(self._duties[type(request)], request, run))
        self._jobs.append(job)
        job.go_on()

    def events(self) -> tuple[RequestDone | RequestFailed, ...]:
        """The requests that have ended since the last call, in the order in which they were begun."""
        ready = [job for job in self._jobs if job.waits_for is not None and job.waits_for.done()]
        for job in ready[:_AT_ONCE]:
            job.go_on()
        ended = [job.outcome for job in self._jobs if job.outcome is not None]
        self._jobs = [job for job in self._jobs if job.outcome is None]
        return tuple(ended)

    def finish(self, *, exports: bool) -> None:
        """Wait until all requests have ended, which takes no time of a logical clock.

        Args:
            exports: whether to wait for files of the exporter, too.
        """
        for job in self._jobs:
            while (future := job.waits_for) is not None and (exports or future.done() or self._threads.runs(future)):
                wait([future])
                job.go_on()

    def close(self) -> None:
        """End the threads. Another worker can begin unfinished requests again."""
        for job in self._jobs:
            job.steps.close()
        self._jobs.clear()
        self._threads.close()


async def _handle(handler: Handler, request: Request, run: Snapshot) -> RequestDone | RequestFailed:
    """Handle a request. An error fails the request, not the run."""
    try:
        return RequestDone(request=request, result=await handler.work(request, run))
    except Exception as error:  # noqa: BLE001  # see above
        known = isinstance(error, SubfleetError)
        text = str(error) if known else find_cause(error)
        reason = text if isinstance(error, handler.reasons) else f"{handler.failure}: {text}"
        _LOG.warning("%s (%.200r)", reason, request, exc_info=None if known else error)
        by_disk = handler.needs_disk and isinstance(error, FileError)
        reason = text if by_disk else reason[:_MOST_CHARACTERS]
        return RequestFailed(request=request, reason=reason, by_disk=by_disk)
