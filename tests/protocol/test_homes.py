"""Where a user's files go: with a home folder, without one, and where a folder belongs to another user."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from subfleet.protocol.errors import FileError
from subfleet.protocol.homes import find_cache_folder, find_home, find_state_root, set_home


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder for this test, and an environment that names no folders."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", refuse)


def test_the_home_and_the_folders_of_the_environment_are_used(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_home() == tmp_path
    assert (find_cache_folder(), find_state_root()) == (tmp_path / ".cache", tmp_path / ".local" / "state")
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    assert find_home() == tmp_path / "new", "the folder can be created"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (find_cache_folder(), find_state_root()) == (Path("/c"), Path("/s"))
    environment = {"HOME": str(tmp_path)}
    set_home(environment)
    assert environment["HOME"] == str(tmp_path)
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("unknown_user")
def test_a_user_id_without_a_name_has_its_own_folder(temporary: Path) -> None:
    own = temporary / f"subfleet-{os.getuid()}"
    assert find_home() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert (find_cache_folder(), find_state_root()) == (own / ".cache", own / ".local" / "state")
    environment: dict[str, str] = {}
    set_home(environment)
    assert environment == {"HOME": str(own), "LOGNAME": f"uid{os.getuid()}"}
    named = {"USER": "me"}
    set_home(named)
    assert "LOGNAME" not in named


@pytest.mark.usefixtures("unknown_user")
@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_another_user_could_have_made_is_not_trusted(tmp_path: Path, temporary: Path, kind: str) -> None:
    own = temporary / f"subfleet-{os.getuid()}"
    if kind == "open":
        own.mkdir()
        own.chmod(0o777)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.write_bytes(b"")
    with pytest.raises(FileError, match="set HOME to a folder that you can write"):
        find_cache_folder()
    environment: dict[str, str] = {}
    set_home(environment)
    assert "HOME" not in environment, "many commands need no home"


@pytest.mark.usefixtures("unknown_user")
def test_without_a_temporary_folder_the_sentence_names_the_variable(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", find_nothing)
    with pytest.raises(FileError, match=r"no home folder.*\(No usable temporary directory found\); set HOME"):
        find_state_root()
