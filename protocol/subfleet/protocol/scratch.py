"""Scratch folders for temporary files, which are removed even after a kill.

A killed process cannot clean up. So each folder is locked while its process lives, and the next process that makes a
folder, or starts a command, removes all unlocked ones.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from subfleet.protocol.disks import lock
from subfleet.protocol.errors import FileError, UnsupportedSystemError, explain_os_errors

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - our own folders are made below it
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
        parent: the containing folder; folders in it that killed processes left behind are removed first.

    Raises:
        FileError: the folder cannot be made.
    """
    sweep((parent,))
    with explain_os_errors(f"no scratch folder can be made in {parent}", "free some space, or make it writable"):
        folder, descriptor = make_locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(parents: Iterable[Path]) -> None:
    """Remove this user's unlocked scratch folders, as far as possible."""
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
            descriptor = os.open(folder, os.O_RDONLY | _FOLDER_ONLY)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        try:
            lock(descriptor, wait=False)
        except BlockingIOError:
            pass  # another process is sweeping it
        else:
            if _is_at(folder, descriptor):
                return folder, descriptor
        os.close(descriptor)
    raise FileError(f"scratch folders in {parent} disappear at once; find out what removes them")


def _remove_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | _FOLDER_ONLY)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid() and lock(descriptor, wait=False) and _is_at(folder, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether the open folder is still at its path."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
