"""One type for whatever goes wrong while a program is written: tools that write and run it raise errors of any type."""

from collections.abc import Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import ExportError, SubfleetError

__all__ = ["as_export_errors"]


@contextmanager
def as_export_errors(
    what: str = "the program cannot be written", remedy: str = "use other layers, and report it with the request"
) -> Iterator[None]:
    """While it is entered, every error is one of ours.

    Args:
        what: cannot be done.
        remedy: what to do then.

    Raises:
        ExportError: in place of an error of another type, which it tells and has as its cause.
    """
    try:
        yield
    except (SubfleetError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"{what}: {type(error).__name__}: {reason:.300}; {remedy}") from error
