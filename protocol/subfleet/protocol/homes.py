"""Finds the folders of a user's own files, even without a home, as in a container with a numeric user.

Such a user gets a folder below the temporary one, which nobody else can write: its files are trusted like a home's.
"""

import os
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from subfleet.protocol.errors import FileError, explain_os_errors


def find_cache_folder() -> Path:
    """Find the cache folder: $XDG_CACHE_HOME, or .cache in the home.

    Raises:
        FileError: as `find_home`.
    """
    return _find_folder("XDG_CACHE_HOME", ".cache")


def find_state_root() -> Path:
    """Find the state folder: $XDG_STATE_HOME, or .local/state in the home.

    Raises:
        FileError: as `find_home`.
    """
    return _find_folder("XDG_STATE_HOME", ".local/state")


def find_home() -> Path:
    """Find the home, or make a substitute.

    Raises:
        FileError: there is no home, and no substitute can be made.
    """
    home = _find_home()
    return _make_substitute() if home is None else home


def set_home(environment: MutableMapping[str, str]) -> None:
    """Set $HOME and a user name for libraries, if the system has none.

    If no substitute for the home can be made, nothing is set: many commands need no home.
    """
    if _find_home() is None:
        with suppress(FileError):
            environment["HOME"] = str(_make_substitute())
    if not _is_known(os.getuid()) and not any(environment.get(name) for name in _NAMES):
        environment["LOGNAME"] = f"uid{os.getuid()}"


_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where `getpass.getuser` looks first."""


def _find_folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable)
    if named:
        return Path(named)
    folder = find_home() / usual
    # A read-only home, as system users have, may still have a writable cache.
    return folder if _can_create(folder) else _make_substitute() / usual


def _find_home() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:  # no $HOME, and a number without a name
        return None
    # In containers the home of a numeric user is the root folder, and that of system users may not exist.
    usable = _can_create(home) or (home.is_dir() and home != Path(home.anchor))
    return home if usable else None


def _can_create(folder: Path) -> bool:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _is_known(uid: int) -> bool:
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _make_substitute() -> Path:
    remedy = "set HOME to a folder that you can write"
    with explain_os_errors("you have no home folder, and no temporary one can be made", remedy):
        folder = Path(tempfile.gettempdir()) / f"subfleet-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise FileError(f"you have no home folder, and {str(folder)!r} is somebody else's, or open to others; {remedy}")
    return folder
