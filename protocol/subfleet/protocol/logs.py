"""What of the logs the user of a command is shown, and in which form."""

import logging
import sys
from types import TracebackType

from subfleet.protocol.text import escape

_LINES = "\n\t"
"""What tracebacks are made of."""


def is_shown(record: logging.LogRecord) -> bool:
    """A filter of logs: libraries tell of every font and every instruction that they look at, which hides our own."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in ("subfleet", "__main__")


class PlainFormatter(logging.Formatter):
    """Writes each message as one line, with escapes for what terminals act on: others wrote parts of it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line, without a traceback."""
        return escape(super().formatMessage(record))

    def formatException(  # noqa: N802 - logging's own name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """The traceback, whose last lines are the text of an exception."""
        return escape(super().formatException(ei), keep=_LINES)

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's own name
        """The stack, where a record has one."""
        return escape(super().formatStack(stack_info), keep=_LINES)


def log_to_standard_error(level: int, *, form: str) -> None:
    """Write the logs of this process to standard error; where they are written already, nothing changes.

    Args:
        level: the least that is shown.
        form: of a line, as `logging.Formatter` takes it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_shown)
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
