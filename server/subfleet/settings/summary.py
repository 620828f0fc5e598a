"""What a run came to, `summary.json` in its folder: written as a whole or not at all, and read by everybody here."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subfleet.protocol.errors import FileError, SubfleetError

__all__ = ["SUMMARY", "read_summary", "understood_summary", "write_summary"]

SUMMARY = "summary.json"
"""It is there when the run is over."""


def write_summary(folder: Path, record: Mapping[str, Any]) -> None:
    """Write it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / SUMMARY
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105 - the same call, and atomic on every system


def read_summary(folder: Path) -> Mapping[str, Any] | None:
    """What the run of a folder came to; None where it is not over.

    Raises:
        FileError: it cannot be read, or is no summary.
    """
    path = folder / SUMMARY
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; make it readable, or run that again") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _damaged(folder, f"it is {type(found).__name__}, but must be an object")
    return found


@contextmanager
def understood_summary(folder: Path) -> Iterator[None]:
    """Work on a summary: whatever fails in it is damage of that file, or another release's way to write it.

    Raises:
        FileError: it is.
        SubfleetError: any other one that is raised within.
    """
    try:
        yield
    except SubfleetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def _damaged(folder: Path, why: str) -> FileError:
    return FileError(
        f"{folder / SUMMARY} is damaged, or was written by another release ({' '.join(why.split()):.200}); run that "
        "again, or restore the file"
    )
