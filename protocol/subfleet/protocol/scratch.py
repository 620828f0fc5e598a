"""Scratch folders for temporary files, which are removed even after a kill.

A process that is killed removes nothing. Its folder is locked as long as it lives, and the next process that makes a
folder, or starts as a command, removes those that nobody has locked.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from subfleet.protocol.disks import lock
from subfleet.protocol.errors import FileError, UnsupportedSystemError

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - folders of our own are made below it
"""Where Linux keeps files in memory."""
_PREFIX = "subfleet-scratch-"
_FOLDER_ONLY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_MOST_TRIES = 100


def list_scratch_folders() -> tuple[Path, ...]:
    """List the folders in which scratch folders are made."""
    return (MEMORY_FOLDER, Path(tempfile.gettempdir()))


@contextmanager
def make_scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder that is removed with its content when the context ends, or after the process was killed.

    Args:
        parent: in which it is made; folders there that killed processes have left are removed first.

    Raises:
        FileError: it cannot be made.
    """
    sweep((parent,))
    try:
        folder, held = make_locked_folder(parent)
    except OSError as error:
        raise FileError(
            f"no scratch folder can be made in {parent} ({error.strerror}); make room there, or make it writable"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(parents: Iterable[Path]) -> None:
    """Remove the scratch folders of this user that no process holds any more, as far as possible."""
    for parent in parents:
        with suppress(OSError):
            for folder in sorted(parent.glob(f"{_PREFIX}*")):
                with suppress(OSError, UnsupportedSystemError):
                    _remove_unlocked(folder)


def make_locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a locked folder; returns it with the descriptor that locks it."""
    for _ in range(_MOST_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            held = os.open(folder, os.O_RDONLY | _FOLDER_ONLY)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        try:
            lock(held, wait=False)
        except BlockingIOError:
            pass  # another process is sweeping it
        else:
            if _is_at(folder, held):
                return folder, held
        os.close(held)
    raise FileError(f"no scratch folder stays in {parent}; find out what removes folders there")


def _remove_unlocked(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | _FOLDER_ONLY)
    try:
        if os.fstat(held).st_uid == os.geteuid() and lock(held, wait=False) and _is_at(folder, held):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _is_at(folder: Path, held: int) -> bool:
    """Whether a path still leads to an open folder."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(held))
