"""File systems without locks, and with folders that cannot be synced."""

import errno
import fcntl
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from subfleet.agent.states import Saved
from subfleet.edge_client.store import AgentStore
from subfleet.journal.places import Places
from subfleet.protocol.disks import lock, sync_folder
from subfleet.protocol.errors import FileError, UnsupportedSystemError

UNSUPPORTED_ERRORS = [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL]


def make_failing(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert lock(first, wait=False)
        with pytest.raises(BlockingIOError):
            lock(second, wait=False)


@pytest.mark.parametrize("number", UNSUPPORTED_ERRORS)
def test_without_locks_devices_and_servers_log_a_warning_and_run(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", make_failing(number))
    with AgentStore.open(tmp_path) as store, Places(tmp_path).lock():
        store.save(Saved(done=("one",)))
        assert store.load().done == ("one",)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "does not support locks; do not start another agent" in caplog.messages[0]
    assert "does not support locks; do not start another server" in caplog.messages[1]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_other_errors_of_locks_have_the_text_of_the_system(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", make_failing(number))
    for held in (AgentStore.open(tmp_path), Places(tmp_path).lock()):
        with pytest.raises(FileError, match=os.strerror(number)), held:
            raise AssertionError


def test_a_folder_that_cannot_be_synced_keeps_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def sync_files_only(number: int) -> None:
        if Path(f"/proc/self/fd/{number}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(number)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    with AgentStore.open(tmp_path) as store:
        store.save(Saved(done=("one",)))
        ref = store.blobs.add(b"content")
        assert store.load().done == ("one",)
        assert store.blobs.path(ref).read_bytes() == b"content"
    monkeypatch.setattr(os, "fsync", make_failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_on_systems_without_such_locks_the_error_names_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "lock").open("w") as file, pytest.raises(UnsupportedSystemError, match="use WSL 2"):
        lock(file, wait=False)
