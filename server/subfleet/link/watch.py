"""Watches the processes that a run depends on, beside the server's loop."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

INTERVAL_S = 0.5


@contextmanager
def watch(checks: Sequence[Callable[[], None]], stop: threading.Event) -> Iterator[Callable[[], None]]:
    """A context in which checks run periodically in a thread of their own.

    A check repairs what it can: the embedded broker's `start` does nothing while the broker runs, and restarts it if it
    was killed. If a check raises, the run is stopped.

    Args:
        checks: to run.
        stop: set when a check has failed.

    Yields:
        A function that raises the error of a failed check, if there is one.
    """
    over = threading.Event()

    def run_checks() -> None:
        while not over.wait(INTERVAL_S):
            for check in checks:
                check()

    def raise_failure() -> None:
        if watching.done():
            watching.result()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-watch") as pool:
        watching = pool.submit(run_checks)
        watching.add_done_callback(lambda ended: stop.set() if ended.exception() else None)
        try:
            yield raise_failure
        finally:
            over.set()
