"""A journal with flipped bytes, cut short, or with odd values: each reader goes on, or reports the damage."""

import asyncio
import contextlib
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from server.server_rig import FakeExports, HandClock, Notes, World, config, fleet

from subfleet.journal.base import AbsenceRecord
from subfleet.journal.database import DATABASE_NAME, METADATA, open_database, records, reporting_damage
from subfleet.journal.journal import Journal
from subfleet.link.device_link import connect_devices
from subfleet.protocol.errors import FileError, SubfleetError
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.transport.in_memory import MemoryBroker

pytestmark = pytest.mark.slow

FLIPS, CUTS = 40, 10
ODD_VALUES = (2**62, "[" * 5000, b"\xff")


@dataclass(frozen=True, kw_only=True)
class Written:
    """The folder of a run that was killed while its second round trained."""

    folder: Path
    settings: Run
    run_id: str

    @property
    def journal(self) -> bytes:
        return (self.folder / DATABASE_NAME).read_bytes()

    def copy(self, folder: Path, journal: bytes | None = None) -> Path:
        """Copy the state folder, with another journal if given."""
        state_folder = folder / "state"
        shutil.rmtree(state_folder, ignore_errors=True)
        shutil.copytree(self.folder, state_folder)
        if journal is not None:
            (state_folder / DATABASE_NAME).write_bytes(journal)
        return state_folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("run")
    world = World(folder, config(deploy_targets=()), fleet())
    world.run(lambda: (world.server.state.round, world.server.state.phase) == (2, "train"))
    run_id = world.server.context.run_id
    world.server.close()
    state_folder = folder / "state"
    engine = open_database(state_folder)
    start = next(iter(Journal(engine, run_id).records())).round
    assert start == 1
    Journal(engine, run_id).save_absences([AbsenceRecord(client_id="ada", kind="silent", reason="gone", seen_at=None)])
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    for beside in ("-wal", "-shm"):
        (state_folder / f"{DATABASE_NAME}{beside}").unlink(missing_ok=True)
    return Written(folder=state_folder, settings=world.settings, run_id=run_id)


def resume_server(written: Written, state_folder: Path) -> None:
    """Read the journal as a server that resumes the run."""
    clock = HandClock()
    link, exports = MemoryBroker(clock=clock).client("server"), FakeExports(state_folder.parent / "exports")
    server = Server(
        written.settings,
        connect_devices("main", link, clock=clock),
        Notes(),
        state_folder=state_folder,
        exports=exports,
        clock=clock,
    )
    with contextlib.closing(server):
        server.open()
        server.result()
        server.step(0.0)
        server.finish()


def read_journal(written: Written, state_folder: Path) -> None:
    """Read the journal as other processes do beside the server."""
    engine = open_database(state_folder, warns=False)
    try:
        journal = Journal(engine, written.run_id)
        journal.records(newest=1)
        journal.evaluations()
        journal.generations()
        journal.checkpoint_sha256(1)
        journal.update_digests(since_round=0)
        journal.absences()
    finally:
        engine.dispose()


def query_api(written: Written, state_folder: Path) -> None:
    """Read the journal through the HTTP API; an unhandled exception would reach this test."""

    from subfleet.reporting.api import create_app

    api = f"/api/runs/{written.run_id}"
    paths = ["/", "/api/runs", api, f"{api}/rounds", f"{api}/clients", f"{api}/evaluations"]

    async def get() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in paths]

    app = create_app(state_folder)
    try:
        responses = asyncio.run(get())
    except SubfleetError as error:
        raise AssertionError("the API must answer with an error message") from error
    for response in responses:
        if response.status_code == 500:
            assert "journal" in response.json()["detail"]
        else:
            assert response.status_code in (200, 404)


READERS: tuple[Callable[[Written, Path], None], ...] = (resume_server, read_journal, query_api)


def check(written: Written, state_folder: Path) -> set[str]:
    """Let all readers read a journal; return the names of those that ended with an error message."""
    failed = set()
    for read in READERS:
        try:
            read(written, state_folder)
        except SubfleetError:
            failed.add(read.__name__)
    return failed


def flip_bytes(content: bytes) -> Iterator[bytes]:
    draw = random.Random(37)
    for _ in range(FLIPS):
        damaged = bytearray(content)
        # The first page has the header and the schema.
        position = draw.randrange(draw.choice((100, 4096, len(damaged))))
        damaged[position] ^= draw.randrange(1, 256)
        yield bytes(damaged)


def cut_short(content: bytes) -> Iterator[bytes]:
    draw = random.Random(38)
    yield from (content[:length] for length in (1, 16, 99, 100, 4095, 4096))
    for _ in range(CUTS):
        yield content[: draw.randrange(len(content))]


def test_all_readers_read_the_undamaged_journal(tmp_path: Path, written: Written) -> None:
    assert check(written, written.copy(tmp_path)) == set()


@pytest.mark.parametrize("damage", [flip_bytes, cut_short])
def test_a_damaged_file_is_read_or_reported(
    tmp_path: Path, written: Written, damage: Callable[[bytes], Iterator[bytes]]
) -> None:
    failed = [check(written, written.copy(tmp_path, content)) for content in damage(written.journal)]
    assert set().union(*failed) >= {"resume_server", "read_journal"}, "some of the damage must be detected"


COLUMNS = [str(column) for table in METADATA.sorted_tables for column in table.columns]


@pytest.mark.parametrize(("number", "column"), list(enumerate(COLUMNS)), ids=COLUMNS)
def test_a_value_that_no_release_writes_is_read_or_reported(
    tmp_path: Path, written: Written, number: int, column: str
) -> None:
    check_column(tmp_path, written, column, ODD_VALUES[number % len(ODD_VALUES)])


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_every_value_that_no_release_writes_is_read_or_reported(tmp_path: Path, written: Written, column: str) -> None:
    check_column(tmp_path, written, column, *ODD_VALUES)


def check_column(tmp_path: Path, written: Written, column: str, *values: object) -> None:
    """Let all readers read a journal with each of the values in a whole column."""
    table, name = column.split(".")
    for value in values:
        state_folder = written.copy(tmp_path)
        connection = sqlite3.connect(state_folder / DATABASE_NAME)
        try:
            connection.execute("PRAGMA writable_schema=ON")  # allows empty values everywhere
            connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
            connection.commit()
            connection.close()
            connection = sqlite3.connect(state_folder / DATABASE_NAME)
            with contextlib.suppress(sqlite3.IntegrityError):  # a duplicate key
                connection.execute(f"UPDATE {table} SET {name} = ?", (value,))  # noqa: S608 - names of the schema
            connection.commit()
        finally:
            connection.close()
        check(written, state_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("state SET value = '{\"type\":\"trai\"}' WHERE part = 'at'", "at has the type 'trai', but must be one of"),
        ("state SET value = x'00'", "state.value is b"),
        ("state SET value = '4' WHERE part = 'round'", "the run is in round 4, but the last aggregated round is 1"),
        (
            "state SET value = '-1' WHERE part = 'requested_attempt'",
            "counts of rounds and attempts are (2, 0, 0, 0, -1)",
        ),
        ("state SET value = '[{' WHERE part = 'outliers'", "Expecting property name"),
        ("state SET part = 'lasting' WHERE part = 'last'", "'lasting' is not a part of a state; the known parts are"),
        ("runs SET settings = '[]'", "'list' object has no attribute"),
        ("state SET value = '[]' WHERE part = 'profiles'", "is [], but must be a table"),
        ("state SET value = '{}' WHERE part = 'written'", " is missing"),
    ],
)
def test_a_damaged_value_is_named_when_the_run_is_resumed(
    tmp_path: Path, written: Written, change: str, message: str
) -> None:
    state_folder = written.copy(tmp_path)
    connection = sqlite3.connect(state_folder / DATABASE_NAME)
    connection.execute(f"UPDATE {change}")
    connection.commit()
    connection.close()
    with pytest.raises(FileError, match=r"is damaged, or was written by another release.*restore it") as raised:
        resume_server(written, state_folder)
    assert message in str(raised.value)


def test_an_impossible_time_is_damage(tmp_path: Path, written: Written) -> None:
    engine = open_database(written.copy(tmp_path))
    record = '{"client_id": "ada", "kind": "silent", "reason": "gone", "seen_at": 1e300}'
    with engine.begin() as connection:
        connection.execute(records.update().where(records.c.part == "absence").values(value=record))
    with pytest.raises(FileError, match=r"seen_at is 1e\+300, but must be"):
        Journal(engine, written.run_id).absences()
    engine.dispose()


def test_an_error_of_another_kind_is_no_damage() -> None:
    with pytest.raises(FileError, match=r"^no room$"), reporting_damage("here"):
        raise FileError("no room")


def test_the_name_of_a_journal_has_no_password(tmp_path: Path, written: Written) -> None:
    state_folder = written.copy(tmp_path)
    engine = open_database(state_folder)
    broken = replace(written, run_id="none")
    with pytest.raises(FileError, match=f"the journal in {state_folder / DATABASE_NAME} is damaged"):
        Journal(engine, broken.run_id).load(0.0)
    engine.dispose()
