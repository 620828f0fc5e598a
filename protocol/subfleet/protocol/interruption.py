"""Detects Ctrl-C, so that an interrupted process ends as such even if a library raised another error."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; `KeyboardInterrupt` is raised as usual.

    Catching that is not enough: packages that are interrupted during import may raise other errors instead.
    """
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    # Only the main thread may set handlers. A handler that somebody else has set stays.
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
