"""Watches the processes that a run depends on, beside the server's loop."""

import threading
from collections.abc import Callable, Sequence

from subfleet.protocol.errors import SubfleetError

INTERVAL_S = 0.5


class Watch:
    """A context in which checks run periodically in a thread of their own.

    A check repairs what it can: the embedded broker's `start` does nothing while the broker runs, and restarts it if it
    was killed. If a check raises, the run is stopped.

    Args:
        checks: to run.
        stop: set when a check has failed.
    """

    def __init__(self, checks: Sequence[Callable[[], None]], stop: threading.Event) -> None:
        self._checks = tuple(checks)
        self._stop = stop
        self._over = threading.Event()
        self._failure: SubfleetError | None = None
        self._thread = threading.Thread(target=self._watch, name="subfleet-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the error of a failed check.

        Raises:
            SubfleetError: of the check.
        """
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        try:
            while not self._over.wait(INTERVAL_S):
                for check in self._checks:
                    check()
        except SubfleetError as error:
            self._failure = error
            self._stop.set()
