"""Jobs in the order of their submission, and how long the oldest one has waited."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from subfleet.export.jobs import ExportJob

__all__ = ["WaitingJobs"]

Waiting = tuple[ExportJob, "Future[Path]"]


class WaitingJobs:
    """A queue from which some take what comes, and others what nobody has taken for a while; for any threads."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Waiting]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: ExportJob, future: "Future[Path]") -> None:
        """Add a job behind the others."""
        with self._changed:
            self._waiting.append((time.monotonic(), (job, future)))
            self._changed.notify_all()

    def close(self) -> None:
        """Give away what waits, at once, and end whoever takes after that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, *, after_s: float = 0.0) -> Waiting | None:
        """The oldest job as soon as it has waited so long, 0 or more; None where the queue is closed and empty."""
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
