"""Finds the folders of a user's own files, even without a home, as in a container with a numeric user.

Such a user has a folder below the temporary one. It is nobody else's: what lies in it is trusted like a home's files.
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
    """The home, or the folder that takes its place where there is none.

    Raises:
        FileError: there is no home, and nothing can take its place.
    """
    home = _find_home()
    return _make_substitute() if home is None else home


def set_home(environment: MutableMapping[str, str]) -> None:
    """Name a home and a user to libraries, which look for both in their own ways, where the system names none.

    Where no folder can take the home's place it is left to whoever needs one: many commands need none.
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
    # A home that can be read only, such as that of a system's own user, may have a writable cache, or none.
    return folder if _can_be_made(folder) else _make_substitute() / usual


def _find_home() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:  # no $HOME, and a number without a name
        return None
    # Containers name the root folder as the home of a number without a name, and of system users one that is not there.
    is_one = _can_be_made(home) or (home.is_dir() and home != Path(home.anchor))
    return home if is_one else None


def _can_be_made(folder: Path) -> bool:
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
    ask = "set HOME to a folder that you can write"
    with explain_os_errors("you have no home folder, and no temporary one can be made", f"{ask}"):
        folder = Path(tempfile.gettempdir()) / f"subfleet-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise FileError(f"you have no home folder, and {str(folder)!r} is somebody else's, or open to others; {ask}")
    return folder
