"""Crash-safe files, and features that file systems may lack: locks, and directory entries that survive a power cut.

Network file systems and shared folders often lack both. Devices and servers continue without them.
"""

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from subfleet.protocol.errors import UnsupportedSystemError

_BLOCK_BYTES = 2**20
_CANNOT = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


def lock(file: IO[Any] | int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed or this process ends; False if the file system has no locks.

    Args:
        file: open for writing, or the descriptor of an open folder.
        wait: whether to wait until the lock is free.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        OSError: the file system fails.
        UnsupportedSystemError: the operating system has no such locks.
    """
    try:
        import fcntl
    except ModuleNotFoundError as error:
        raise UnsupportedSystemError from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, block by block; raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file, so that it is complete or unchanged even after a power cut; raises OSError."""
    partial = path.with_name(f"{path.name}.part")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk the partial file would keep it full
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power cut, if the file system can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(number)
