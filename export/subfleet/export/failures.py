"""One type for whatever goes wrong while a program is written: tools that write and run it raise errors of any type."""

from collections.abc import Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import ExportError, SubfleetError

__all__ = ["as_export_errors"]


@contextmanager
def as_export_errors() -> Iterator[None]:
    """While it is entered, every error is one of ours.

    Raises:
        ExportError: in place of an error of another type, which it tells and has as its cause.
    """
    try:
        yield
    except (SubfleetError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"the program cannot be written: {type(error).__name__}: {reason:.300}; use other layers, and report it "
            "with the request"
        ) from error
