"""The tables of the journal in SQLite, and how a database is opened and read.

SQLite detects damaged pages and nothing else: it accepts values of any type in any column, and a flipped byte in a text
is another text. So every value is checked when it is read, and damage ends as one typed error.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sqlalchemy as sql
from sqlalchemy.pool import ConnectionPoolEntry

from subfleet.protocol.errors import FileError, ProtocolError, SubfleetError
from subfleet.protocol.plugins import explain_plugin_error

_LOG = logging.getLogger(__name__)

DATABASE_NAME = "subfleet.sqlite"
METADATA = sql.MetaData()


def _values_table(name: str) -> sql.Table:
    """A table of values as canonical JSON, each under the name of its part and a key within that."""
    return sql.Table(
        name,
        METADATA,
        sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
        sql.Column("part", sql.String, primary_key=True),
        sql.Column("key", sql.String, primary_key=True),
        sql.Column("value", sql.Text, nullable=False),
    )


runs = sql.Table(
    "runs",
    METADATA,
    sql.Column("run_id", sql.String, primary_key=True),
    sql.Column("name", sql.String, nullable=False, unique=True),
    *(
        sql.Column(name, sql.Text, nullable=False)
        for name in ("settings", "phase", "waits_for", "failure", "started_at")
    ),
    *(
        sql.Column(name, sql.Integer, nullable=False)
        for name in ("round_count", "round", "aggregated_round", "attempt", "lost")
    ),
)
state = _values_table("state")
records = _values_table("records")


def open_database(location: Path | str, *, warns: bool = True, lock_timeout_s: float = 10.0) -> sql.Engine:
    """Open a database, and create missing tables.

    Args:
        location: the folder of `subfleet.sqlite`, or an SQLAlchemy URL of an SQLite database.
        warns: whether to log a warning if SQLite cannot use its write-ahead log.
        lock_timeout_s: how long SQLite waits for a lock that another connection holds.

    Raises:
        FileError: it cannot be opened, is damaged, or has the tables of another release; it is not changed then.
    """
    url = location if isinstance(location, str) else f"sqlite:///{location / DATABASE_NAME}"
    with reporting_damage(location):
        try:
            engine = sql.create_engine(url)
            sql.event.listen(engine, "connect", partial(_configure, lock_timeout_s))
            sql.event.listen(engine, "handle_error", lambda context: _convert(context, location))
            refused = _enable_log(engine)
            if refused and warns:
                _LOG.warning(
                    "the journal's file system does not support a write-ahead log (%s); commits take longer", refused
                )
            _check_tables(engine, location)
            METADATA.create_all(engine)
        except sqlite3.Error as error:
            raise _describe(error, location) from error
    return engine


_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "locked": "stop the other process that has it open, or choose a folder on a disk of this machine",
        "full": "free some space",
        "readonly": "make it writable, or choose another folder",
        "unable to open": "make its folder and let this user write there",
        "disk I/O": "check the disk, or choose a folder on a disk of this machine",
        "malformed": "restore it from a backup, or choose another folder",
        "decode": "restore it from a backup, or choose another folder",
        "not a database": "move that file away, or choose another folder",
    }
)
"""Remedies, by a part of SQLite's message."""


def _convert(context: sql.engine.ExceptionContext, location: Path | str) -> FileError | None:
    """Convert errors of the database; only its own message says what is wrong with a disk."""
    is_theirs = isinstance(context.sqlalchemy_exception, sql.exc.DBAPIError)
    return _describe(context.original_exception, location) if is_theirs else None


def _describe(error: BaseException, location: Path | str) -> FileError:
    message = " ".join(str(error).split())
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in message), "free some space, or repair it")
    return FileError(f"the journal in {location!s:.200} cannot be used: {message:.200}; {remedy}")


def _check_tables(engine: sql.Engine, location: Path | str) -> None:
    """Check that existing tables have the columns of this release."""
    inspector = sql.inspect(engine)
    for table in METADATA.sorted_tables:
        if not inspector.has_table(table.name):
            continue
        names = {column["name"] for column in inspector.get_columns(table.name)}
        if odd := sorted(names ^ set(table.columns.keys())):
            raise FileError(
                f"the journal in {location!s:.200} was written by another release: in table {table.name!r}, only one "
                f"of the two releases has the column {odd[0]!r}; finish its runs with that release, or choose another "
                "state folder"
            )


def _configure(lock_timeout_s: float, connection: Any, _: ConnectionPoolEntry) -> None:
    """Configure SQLite: every commit is on disk before it returns."""
    for pragma in (f"busy_timeout={lock_timeout_s * 1000:.0f}", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _enable_log(engine: sql.Engine) -> str:
    """Turn on SQLite's write-ahead log, for readers beside one writer; returns why that failed, or "".

    The log needs memory that processes share through a file, which network file systems and containers may lack. The
    slower rollback journal needs none. The mode is stored in the file.
    """
    try:
        mode = _run_pragmas(engine, "PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        # In exclusive mode, a process reads an existing log without that memory.
        _run_pragmas(engine, "PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=DELETE")
        return str(error)
    return "" if mode == "wal" else f"it chose {mode!r}"


def _run_pragmas(engine: sql.Engine, *pragmas: str) -> object:
    """The answer of the last pragma, in a connection of its own that was able to write."""
    arguments, options = engine.dialect.create_connect_args(engine.url)
    opened: Any = engine.dialect.connect(*arguments, **options)
    with contextlib.closing(opened) as connection:
        answers = [connection.execute(pragma).fetchone() for pragma in pragmas]
        connection.execute("BEGIN IMMEDIATE")  # the first write maps the memory
        connection.rollback()
    return answers[-1][0]


def describe_location(engine: sql.Engine) -> str:
    """The location of a journal, without the password of its URL."""
    return engine.url.database or engine.url.render_as_string()


@contextlib.contextmanager
def reporting_damage(location: object) -> Iterator[None]:
    """Work on the content of a journal: every unexpected error in it is reported as damage of that journal.

    Args:
        location: location of the journal.

    Raises:
        FileError: the journal has content that this release cannot read.
        SubfleetError: any other one that is raised within.
    """
    try:
        yield
    except Exception as error:
        is_damage = isinstance(error, ProtocolError)
        if not is_damage and (isinstance(error, SubfleetError) or explain_plugin_error(error)):
            raise
        # A flipped byte may fail anywhere in the code that uses it.
        reason = " ".join((str(error) if is_damage else f"{type(error).__name__}: {error}").split())
        raise FileError(
            f"the journal in {location!s:.200} is damaged, or was written by another release: {reason:.200}; "
            "restore it from a backup, or choose another folder"
        ) from error


@contextlib.contextmanager
def connect(engine: sql.Engine) -> Iterator[sql.Connection]:
    """A connection to read with; see `reporting_damage` for its errors."""
    with reporting_damage(describe_location(engine)), engine.connect() as connection:
        yield connection


def read_rows(connection: sql.Connection, query: sql.Select[Any]) -> Iterator[sql.Row[Any]]:
    """The rows of a query, with values of their columns' types.

    Raises:
        ProtocolError: a value has another type.
    """
    columns = tuple(query.selected_columns)
    for row in connection.execute(query):
        for column, value in zip(columns, row, strict=True):
            if not isinstance(value, column.type.python_type):
                raise ProtocolError(f"{column} is {value!r:.80}, but must be of the type {column.type}")
        yield row
