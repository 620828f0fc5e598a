"""A journal with flipped bytes, cut short, or with odd values: whoever reads it goes on, or says what is wrong."""

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

from subfleet.journal.database import DATABASE_NAME, METADATA, open_database, records, reporting_damage
from subfleet.journal.journal import AbsenceRecord, Journal
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

    def copied(self, folder: Path, journal: bytes | None = None) -> Path:
        """The state folder again, with another journal."""
        place = folder / "state"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place)
        if journal is not None:
            (place / DATABASE_NAME).write_bytes(journal)
        return place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("run")
    world = World(folder, config(deploy_targets=()), fleet())
    world.run(lambda: (world.server.state.round, world.server.state.phase) == (2, "train"))
    run_id = world.server.context.run_id
    world.server.close()
    place = folder / "state"
    engine = open_database(place)
    start = next(iter(Journal(engine, run_id).records())).round
    assert start == 1
    Journal(engine, run_id).save_absences([AbsenceRecord(client_id="ada", kind="silent", reason="gone", seen_at=None)])
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    for beside in ("-wal", "-shm"):
        (place / f"{DATABASE_NAME}{beside}").unlink(missing_ok=True)
    return Written(folder=place, settings=world.settings, run_id=run_id)


def taken_up(written: Written, place: Path) -> None:
    """What a server does that takes the run up."""
    clock = HandClock()
    link, exports = MemoryBroker(clock=clock).client("server"), FakeExports(place.parent / "exports")
    server = Server(written.settings, link, Notes(), state_folder=place, exports=exports, clock=clock)
    with contextlib.closing(server):
        server.open()
        server.result()
        server.step(0.0)
        server.finish()


def asked(written: Written, place: Path) -> None:
    """What everybody asks who reads the journal beside the server."""
    engine = open_database(place, warns=False)
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


def served(written: Written, place: Path) -> None:
    """What the HTTP API answers: an exception of its own would reach this test."""

    from subfleet.reporting.api import create_app

    api = f"/api/runs/{written.run_id}"
    paths = ["/", "/api/runs", api, f"{api}/rounds", f"{api}/clients", f"{api}/evaluations"]

    async def get() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in paths]

    app = create_app(place)
    try:
        responses = asyncio.run(get())
    except SubfleetError as error:
        raise AssertionError("the API must answer with a sentence") from error
    for response in responses:
        if response.status_code == 500:
            assert "journal" in response.json()["detail"]
        else:
            assert response.status_code in (200, 404)


READERS: tuple[Callable[[Written, Path], None], ...] = (taken_up, asked, served)


def check(written: Written, place: Path) -> set[str]:
    """Let everybody read a journal; the names of those whom it ended in a sentence."""
    ended = set()
    for read in READERS:
        try:
            read(written, place)
        except SubfleetError:
            ended.add(read.__name__)
    return ended


def flipped(content: bytes) -> Iterator[bytes]:
    draw = random.Random(37)
    for _ in range(FLIPS):
        hurt = bytearray(content)
        # The first page has the header and the schema.
        place = draw.randrange(draw.choice((100, 4096, len(hurt))))
        hurt[place] ^= draw.randrange(1, 256)
        yield bytes(hurt)


def cut(content: bytes) -> Iterator[bytes]:
    draw = random.Random(38)
    yield from (content[:length] for length in (1, 16, 99, 100, 4095, 4096))
    for _ in range(CUTS):
        yield content[: draw.randrange(len(content))]


def test_the_whole_journal_is_read_by_everybody(tmp_path: Path, written: Written) -> None:
    assert check(written, written.copied(tmp_path)) == set()


@pytest.mark.parametrize("hurt", [flipped, cut])
def test_a_damaged_file_is_read_or_ends_in_a_sentence(
    tmp_path: Path, written: Written, hurt: Callable[[bytes], Iterator[bytes]]
) -> None:
    ended = [check(written, written.copied(tmp_path, content)) for content in hurt(written.journal)]
    assert set().union(*ended) >= {"taken_up", "asked"}, "some of the damage must have been seen"


COLUMNS = [str(column) for table in METADATA.sorted_tables for column in table.columns]


@pytest.mark.parametrize(("number", "column"), list(enumerate(COLUMNS)), ids=COLUMNS)
def test_a_value_that_no_release_writes_is_read_or_ends_in_a_sentence(
    tmp_path: Path, written: Written, number: int, column: str
) -> None:
    check_column(tmp_path, written, column, ODD_VALUES[number % len(ODD_VALUES)])


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_every_value_that_no_release_writes_is_read_or_ends_in_a_sentence(
    tmp_path: Path, written: Written, column: str
) -> None:
    check_column(tmp_path, written, column, *ODD_VALUES)


def check_column(tmp_path: Path, written: Written, column: str, *values: object) -> None:
    """Let everybody read a journal with each of the values in a whole column."""
    table, name = column.split(".")
    for value in values:
        place = written.copied(tmp_path)
        connection = sqlite3.connect(place / DATABASE_NAME)
        try:
            connection.execute("PRAGMA writable_schema=ON")  # columns that must not be empty are, all the same
            connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
            connection.commit()
            connection.close()
            connection = sqlite3.connect(place / DATABASE_NAME)
            with contextlib.suppress(sqlite3.IntegrityError):  # a key that would be there twice
                connection.execute(f"UPDATE {table} SET {name} = ?", (value,))  # noqa: S608 - names of our own
            connection.commit()
        finally:
            connection.close()
        check(written, place)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("state SET value = '{\"type\":\"trai\"}' WHERE part = 'at'", "at has the type 'trai', but must be one of"),
        ("state SET value = x'00'", "state.value is b"),
        ("state SET value = '4' WHERE part = 'round'", "the run is in round 4 after the aggregation of round 1"),
        (
            "state SET value = '-1' WHERE part = 'requested_attempt'",
            "counts of rounds and attempts are (2, 0, 0, 0, -1)",
        ),
        ("state SET value = '[{' WHERE part = 'outliers'", "Expecting property name"),
        ("state SET part = 'lasting' WHERE part = 'last'", "'lasting' is no part of a state; known are"),
        ("runs SET settings = '[]'", "'list' object has no attribute"),
        ("state SET value = '[]' WHERE part = 'profiles'", "is [], but must be a table"),
        ("state SET value = '{}' WHERE part = 'written'", " is missing"),
    ],
)
def test_a_damaged_value_is_named_when_the_run_is_taken_up(
    tmp_path: Path, written: Written, change: str, told: str
) -> None:
    place = written.copied(tmp_path)
    connection = sqlite3.connect(place / DATABASE_NAME)
    connection.execute(f"UPDATE {change}")
    connection.commit()
    connection.close()
    with pytest.raises(FileError, match=r"is damaged, or was written by another release.*restore it") as raised:
        taken_up(written, place)
    assert told in str(raised.value)


def test_a_time_that_no_clock_shows_is_damage(tmp_path: Path, written: Written) -> None:
    engine = open_database(written.copied(tmp_path))
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
    place = written.copied(tmp_path)
    engine = open_database(place)
    broken = replace(written, run_id="none")
    with pytest.raises(FileError, match=f"the journal in {place / DATABASE_NAME} is damaged"):
        Journal(engine, broken.run_id).load(0.0)
    engine.dispose()
