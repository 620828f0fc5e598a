"""What of the logs the user of a command is shown."""

import logging

__all__ = ["of_subfleet_or_warning"]


def of_subfleet_or_warning(record: logging.LogRecord) -> bool:
    """A filter of logs: libraries tell of every font and every instruction that they look at, which hides our own."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in ("subfleet", "__main__")
