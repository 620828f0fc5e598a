"""The journal's database on unusual file systems: without shared memory, full, read-only, or locked."""

import logging
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sql

from subfleet.journal.database import DATABASE_NAME, open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.errors import FileError
from subfleet.rounds.state import RunState


def mode_of(engine: sql.Engine) -> object:
    with engine.connect() as connection:
        return connection.exec_driver_sql("PRAGMA journal_mode").scalar()


def save_and_load(engine: sql.Engine) -> int:
    """Save a state to a journal, and return the round that it loads."""
    journal = Journal(engine, begin_run(engine, name="one", settings="{}", round_count=9))
    journal.save(RunState(), RunState(round=4, aggregated_round=3))
    return journal.load(0.0).round


def url_without_shared_memory(folder: Path) -> str:
    """Return a URL with SQLite's dot-file locking, which has no shared memory, and hence no write-ahead log."""
    return f"sqlite:///file:{folder / DATABASE_NAME}?vfs=unix-dotfile&uri=true"


def test_a_file_system_without_shared_memory_has_a_rollback_journal_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_database(url_without_shared_memory(tmp_path))
    assert mode_of(engine) == "delete"
    assert save_and_load(engine) == 4
    with engine.connect(), engine.connect() as second:
        assert second.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    (line,) = caplog.messages
    assert line.endswith("file system does not support a write-ahead log (it chose 'delete'); commits take longer")


@pytest.mark.parametrize("had_a_log", [False, True])
def test_failing_shared_memory_is_reported_in_sqlites_words_and_not_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, had_a_log: bool
) -> None:
    if had_a_log:
        engine = open_database(tmp_path)
        assert (mode_of(engine), save_and_load(engine)) == ("wal", 4)
        engine.dispose()
    (tmp_path / f"{DATABASE_NAME}-shm").mkdir()  # where SQLite creates the shared memory
    engine = open_database(tmp_path)
    assert mode_of(engine) == "delete"
    assert save_and_load(engine) == 4
    (line,) = caplog.messages
    assert "not support a write-ahead log (attempt to write a readonly database); commits" in line


def test_a_reader_beside_the_server_does_not_repeat_the_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert mode_of(open_database(url_without_shared_memory(tmp_path), warns=False)) == "delete"
    assert caplog.messages == []


def test_a_full_disk_is_reported_in_sqlites_words(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    with engine.connect() as connection:  # the pool reuses this connection
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(FileError, match=r"cannot be used: database or disk is full; free some space"):
        begin_run(engine, name="one", settings="x" * 1_000_000, round_count=1)


def test_a_readonly_database_is_reported_in_sqlites_words(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / DATABASE_NAME).close()
    with pytest.raises(FileError, match=r"readonly database; make it writable") as raised:
        open_database(f"sqlite:///file:{tmp_path / DATABASE_NAME}?mode=ro&uri=true")
    assert "\n" not in str(raised.value)


def test_an_absent_folder_is_reported_in_sqlites_words(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"unable to open database file; make its folder"):
        open_database(tmp_path / "absent")


@pytest.mark.parametrize("reads", [False, True])
def test_a_locked_database_is_reported_in_sqlites_words(tmp_path: Path, *, reads: bool) -> None:
    engine = open_database(url_without_shared_memory(tmp_path), lock_timeout_s=0.001)
    journal = Journal(engine, begin_run(engine, name="one", settings="{}", round_count=9))
    other = sqlite3.connect(f"file:{tmp_path / DATABASE_NAME}?vfs=unix-dotfile", uri=True)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(FileError, match=r"database is locked; stop the other process that has it open"):
            journal.load(0.0) if reads else journal.save(RunState(), RunState(round=4, aggregated_round=3))
    finally:
        other.close()
    journal.save(RunState(), RunState(round=4, aggregated_round=3))
    assert journal.load(0.0).round == 4
