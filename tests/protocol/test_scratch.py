"""A process removes the scratch folders of killed processes, and no others."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from subfleet.protocol import disks, scratch, starting
from subfleet.protocol.errors import FileError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.scratch import make_scratch_folder, sweep

CHILD = """
import sys, time
from pathlib import Path
from subfleet.protocol.scratch import make_scratch_folder
with make_scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "weights").write_bytes(bytes(100_000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def start_child(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that keeps a scratch folder in `parent` until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.slow
def test_the_folder_of_a_process_stays_while_it_lives_and_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MEMORY_FOLDER", tmp_path)
    with start_child(tmp_path) as (process, folder):
        assert starting.settle("test") is ExitCode.OK
        assert (folder / "deep" / "weights").exists(), "its owner is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists(), "a killed process removes nothing"
        assert starting.settle("test") is ExitCode.OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with start_child(tmp_path) as (process, folder):
        assert folder.parent == tmp_path
        process.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_replaces_abandoned_ones(tmp_path: Path) -> None:
    abandoned = tmp_path / "subfleet-scratch-left"
    (abandoned / "deep").mkdir(parents=True)
    with make_scratch_folder(tmp_path) as first, make_scratch_folder(tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted((first, second)), "each has its own, even in one process"
        assert first.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    user_folder = tmp_path / "mine"
    user_folder.mkdir()
    (user_folder / "kept").write_text("")
    parent = tmp_path / "place"
    parent.mkdir()
    (parent / "subfleet-scratch-link").symlink_to(user_folder, target_is_directory=True)
    (parent / "subfleet-scratch-file").write_text("")
    (parent / "subfleet-other").mkdir()
    abandoned = parent / "subfleet-scratch-left"
    abandoned.mkdir()
    (abandoned / "link").symlink_to(user_folder, target_is_directory=True)
    sweep((parent, tmp_path / "none"))
    assert {path.name for path in parent.iterdir()} == {
        "subfleet-scratch-link",
        "subfleet-scratch-file",
        "subfleet-other",
    }
    assert (user_folder / "kept").exists()


def test_another_users_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = tmp_path / "subfleet-scratch-left"
    abandoned.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: abandoned.stat().st_uid + 1)
    sweep((tmp_path,))
    assert abandoned.exists()


def test_where_there_are_no_locks_nothing_is_swept_and_folders_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = tmp_path / "subfleet-scratch-left"
    abandoned.mkdir()
    monkeypatch.setattr(scratch, "lock", lambda _file, *, wait: wait)
    with make_scratch_folder(tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == sorted((abandoned, folder))
    assert list(tmp_path.iterdir()) == [abandoned]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked", "while it is locked"])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    descriptors, system_open = [], os.open

    def sweep_and_lock(descriptor: int, *, wait: bool) -> bool:
        descriptors.append(descriptor)
        if len(descriptors) == 1:
            if moment == "while it is locked":
                raise BlockingIOError
            sweep((tmp_path,))
        return disks.lock(descriptor, wait=wait)

    def sweep_and_open(path: Path, flags: int, **options: Any) -> int:
        if not descriptors:
            descriptors.append(0)
            sweep((tmp_path,))
        return system_open(path, flags, **options)

    with monkeypatch.context() as patch:
        if moment == "before it is opened":
            patch.setattr(os, "open", sweep_and_open)
        else:
            patch.setattr(scratch, "lock", sweep_and_lock)
        folder, descriptor = scratch.make_locked_folder(tmp_path)
    sweep((tmp_path,))
    assert folder.is_dir()
    os.close(descriptor)
    assert descriptors
    sweep((tmp_path,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_sweeper_removes_a_folder_that_is_held(tmp_path: Path) -> None:
    finished = threading.Event()

    def sweep_repeatedly() -> None:
        while not finished.is_set():
            sweep((tmp_path,))

    threads = [threading.Thread(target=sweep_repeatedly) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(100):
            with make_scratch_folder(tmp_path) as folder:
                (folder / "file").write_text(str(number))
                assert (folder / "file").read_text() == str(number)
    finally:
        finished.set()
        for thread in threads:
            thread.join()
    sweep((tmp_path,))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_parent_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no scratch folder can be made"), make_scratch_folder(tmp_path / "none"):
        pass
