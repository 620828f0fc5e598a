"""Contains the tools of an export: their errors become ours, and logs, warnings and garbage collection wait."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import ExportError, SubfleetError


@contextmanager
def as_export_errors(
    what: str = "the program cannot be written", remedy: str = "use other layers, and report it with the request"
) -> Iterator[None]:
    """Convert every error that is raised inside to one of ours.

    Args:
        what: what failed, as the beginning of the message.
        remedy: what to do about it.

    Raises:
        ExportError: in place of an error of another type, with its text and as its cause.
    """
    try:
        yield
    except (SubfleetError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"{what}: {type(error).__name__}: {reason:.300}; {remedy}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log messages below errors; failures are reported as exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: scanning a graph's nodes takes a third as long as creating them."""
    if not gc.isenabled():  # the caller turns it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
