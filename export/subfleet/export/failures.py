"""One error type for everything that goes wrong in an export: the tools involved raise errors of any type."""

from collections.abc import Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import ExportError, SubfleetError

__all__ = ["as_export_errors"]


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
