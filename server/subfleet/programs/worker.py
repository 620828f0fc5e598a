"""Work beside the loop: each request is begun here, and `Done` or `Failed` when it has ended. Nothing is waited for.

What does a request is a coroutine. It runs in the thread of the loop and waits, by `wait_for`, for a file of the
exporter or for a function that runs in one of the `Threads`; so whatever it keeps needs no lock.
"""

import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from subfleet.elastic.model_state import ModelState
from subfleet.protocol.errors import FileError, SubfleetError
from subfleet.protocol.loading import cause_of
from subfleet.rounds.signals import Request, RequestDone, RequestFailed
from subfleet.rounds.state import RunState

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8
"""Requests that go on in one step of the loop: each may write a blob."""
_MOST_CHARACTERS = 400  # of a reason, as it stands in tables

T = TypeVar("T")
Steps = Coroutine["Future[Any]", None, T]
"""What does a request: it yields the futures that it waits for."""


class _Completion(Generic[T]):
    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def __await__(self) -> Generator["Future[T]", None, T]:
        yield self._future
        return self._future.result()


async def wait_for(future: "Future[T]") -> T:
    """Wait for a future in a coroutine of a `Worker`; returns its result, or raises its error."""
    return await _Completion(future)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run in which something was asked for; nothing changes it afterwards."""

    state: RunState
    model: ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """How a kind of request is done.

    Attributes:
        work: the coroutine of a request in a run.
        failure: the first words of the reason when it fails.
        reasons: errors that say all that there is to say: their text alone is the reason.
        needs_disk: a FileError is the fault of the server's disk, see `Failed.by_disk`.
    """

    work: Callable[[Any, Snapshot], Steps[Any]]
    failure: str
    reasons: tuple[type[SubfleetError], ...] = ()
    needs_disk: bool = False


class Threads:
    """A thread for each lane: what is submitted to one lane runs in order, and lanes do not wait for each other."""

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
        """Whether a future is of a function that has not ended here; the others are of the exporter."""
        return future in self._futures

    def work(
        self, lane: str, function: Callable[[Any, RunState, ModelState], T]
    ) -> Callable[[Any, Snapshot], Steps[T]]:
        """The work of a request that one function does in the thread of a lane, from the request and the run."""

        async def work(request: Any, run: Snapshot) -> T:
            return await wait_for(self.submit(lane, function, request, run.state, run.model))

        return work

    def close(self) -> None:
        """Wait for what runs; what has not begun is cancelled."""
        for pool in self._lanes.values():
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A request under way.

    Attributes:
        waits_for: where its steps stand; None once it has ended.
        outcome: what it has come to; None before.
    """

    request: Request
    duty: Handler
    steps: Steps[Any]
    waits_for: "Future[Any] | None" = None
    outcome: RequestDone | RequestFailed | None = None

    def go_on(self) -> None:
        """Take the next step. Whatever it raises, the request fails, and not the run."""
        try:
            self.waits_for = self.steps.send(None)
        except StopIteration as ended:
            self.waits_for, self.outcome = None, RequestDone(request=self.request, result=ended.value)
        except Exception as error:  # noqa: BLE001  # see above
            self.waits_for, self.outcome = None, _build_failure(self.request, self.duty, error)


class Worker:
    """Does what a run asks for beside its loop. Every method belongs to the thread of the loop.

    Args:
        duties: how each kind of request is done.
        threads: of the coroutines; they are closed with the worker.
    """

    def __init__(self, duties: Mapping[type, Handler], threads: Threads) -> None:
        self._duties = duties
        self._threads = threads
        self._jobs: list[_Job] = []

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests under way."""
        return tuple(job.request for job in self._jobs)

    @property
    def more(self) -> bool:
        """Whether the next call of `events` has something to do."""
        return any(job.waits_for is None or job.waits_for.done() for job in self._jobs)

    def begin(self, request: Request, run: Snapshot) -> None:
        """Begin a request in a run; one that is under way is not begun again."""
        if any(job.request == request for job in self._jobs):
            return
        duty = self._duties[type(request)]
        job = _Job(request=request, duty=duty, steps=duty.work(request, run))
        self._jobs.append(job)
        job.go_on()

    def events(self) -> tuple[RequestDone | RequestFailed, ...]:
        """The requests that have ended since the last call, in the order in which they were begun."""
        able = [job for job in self._jobs if job.waits_for is not None and job.waits_for.done()]
        for job in able[:_AT_ONCE]:
            job.go_on()
        ended = [job.outcome for job in self._jobs if job.outcome is not None]
        self._jobs = [job for job in self._jobs if job.outcome is None]
        return tuple(ended)

    def finish(self, *, exports: bool) -> None:
        """Wait until what was begun has ended: under a logical clock it takes no time.

        Args:
            exports: whether files of the exporter are waited for, too.
        """
        for job in self._jobs:
            while (future := job.waits_for) is not None and (exports or future.done() or self._threads.runs(future)):
                wait([future])
                job.go_on()

    def close(self) -> None:
        """Let the threads end. What has not ended can be begun again by another worker."""
        for job in self._jobs:
            job.steps.close()
        self._jobs.clear()
        self._threads.close()


def _build_failure(request: Request, duty: Handler, error: Exception) -> RequestFailed:
    if isinstance(error, duty.reasons):
        reason = str(error)
    elif isinstance(error, SubfleetError):
        reason = f"{duty.failure}: {error}"
    else:
        reason = f"{duty.failure}: {cause_of(error)}"
    known = isinstance(error, SubfleetError)
    _LOG.warning("%s (%.200r)", reason, request, exc_info=None if known else error)
    by_disk = duty.needs_disk and isinstance(error, FileError)
    return RequestFailed(request=request, reason=str(error) if by_disk else reason[:_MOST_CHARACTERS], by_disk=by_disk)
