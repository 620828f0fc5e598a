"""Where a user's files go, with a home, without one, and where both are somebody else's."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from subfleet.protocol.errors import FileError
from subfleet.protocol.homes import cache_folder, give_home, home_folder, state_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own, and an environment that names no folders."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", refuse)


def test_a_home_and_what_the_environment_names_are_used_as_they_are(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder() == tmp_path
    assert (cache_folder(), state_folder()) == (tmp_path / ".cache", tmp_path / ".local" / "state")
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    assert home_folder() == tmp_path / "new", "which can be made"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (cache_folder(), state_folder()) == (Path("/c"), Path("/s"))
    environment = {"HOME": str(tmp_path)}
    give_home(environment)
    assert environment["HOME"] == str(tmp_path)
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("unknown")
def test_a_number_without_a_name_has_a_folder_of_its_own(temporary: Path) -> None:
    own = temporary / f"subfleet-{os.getuid()}"
    assert home_folder() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert (cache_folder(), state_folder()) == (own / ".cache", own / ".local" / "state")
    environment: dict[str, str] = {}
    give_home(environment)
    assert environment == {"HOME": str(own), "LOGNAME": f"uid{os.getuid()}"}
    named = {"USER": "me"}
    give_home(named)
    assert "LOGNAME" not in named


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_what_others_could_have_put_there_is_not_trusted(tmp_path: Path, temporary: Path, kind: str) -> None:
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
        cache_folder()
    environment: dict[str, str] = {}
    give_home(environment)
    assert "HOME" not in environment, "many commands need none"


@pytest.mark.usefixtures("unknown")
def test_without_a_temporary_folder_the_sentence_names_the_variable(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(FileError, match=r"no home folder.*\(No usable temporary directory found\); set HOME"):
        state_folder()
