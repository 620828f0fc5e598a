"""Features that file systems may lack: locks, and folder entries that survive a power cut.

Those of networks and of shared folders often have neither. A device or a server goes on there with what they have.
"""

import errno
import os
from pathlib import Path
from typing import IO, Any

from subfleet.protocol.errors import UnsupportedSystemError

__all__ = ["lock", "sync_folder"]

_CANNOT = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


def lock(file: IO[Any] | int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed or this process ends; False if the file system has no locks.

    Args:
        file: open for writing, or the descriptor of an open folder.
        wait: for whoever holds it.

    Raises:
        BlockingIOError: somebody else holds it, and we do not wait.
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
