"""Ctrl-C in a process of ours: whatever a library makes of it, the process ends as one that was stopped."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context whose value says whether Ctrl-C has come; it raises `KeyboardInterrupt` as ever.

    To catch that is not enough: packages that are interrupted while they are loaded raise errors of their own in its
    place, which say nothing of it.
    """
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    # Only the main thread may set handlers. Whoever ignores Ctrl-C, or has a handler of their own, keeps to that.
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
