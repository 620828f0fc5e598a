"""Log output of commands: which records are shown, and how they are formatted."""

import logging
import sys
from types import TracebackType

from subfleet.protocol.text import escape

_LINES = "\n\t"
"""Control characters in tracebacks."""


def is_shown(record: logging.LogRecord) -> bool:
    """Whether to show a record: only warnings of libraries, whose other records would hide ours."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in ("subfleet", "__main__")


class PlainFormatter(logging.Formatter):
    """Formats each message as one line, with terminal control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Format the line, without a traceback."""
        return escape(super().formatMessage(record))

    def formatException(  # noqa: N802 - logging's own name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """Format the traceback, which contains the text of an exception."""
        return escape(super().formatException(ei), keep=_LINES)

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's own name
        """Format the stack of a record."""
        return escape(super().formatStack(stack_info), keep=_LINES)


def log_to_standard_error(level: int, *, form: str) -> None:
    """Write the logs of this process to standard error, unless logging is already configured.

    Args:
        level: the lowest level that is shown.
        form: format of a line, as for `logging.Formatter`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_shown)
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
