"""The tables of the journal in SQLite (or PostgreSQL by URL), and how a database is opened."""

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.pool import ConnectionPoolEntry

from subfleet.protocol.errors import FileError

__all__ = [
    "DATABASE_NAME",
    "METADATA",
    "clients",
    "evaluations",
    "generations",
    "open_database",
    "programs",
    "rounds",
    "runs",
    "tasks",
    "updates",
]

DATABASE_NAME = "subfleet.sqlite"
METADATA = sql.MetaData()

runs = sql.Table(
    "runs",
    METADATA,
    sql.Column("run_id", sql.String, primary_key=True),
    sql.Column("name", sql.String, nullable=False, unique=True),
    sql.Column("settings", sql.Text, nullable=False),
    sql.Column("round_count", sql.Integer, nullable=False),
    sql.Column("phase", sql.String, nullable=False),
    sql.Column("round", sql.Integer, nullable=False),
    sql.Column("folded_round", sql.Integer, nullable=False),
    sql.Column("retry", sql.Integer, nullable=False),
    sql.Column("lost", sql.Integer, nullable=False),
    sql.Column("waits_for", sql.String, nullable=False),
    sql.Column("failure", sql.String, nullable=False),
    sql.Column("pool", sql.Text, nullable=False),
    sql.Column("explored_turn", sql.Integer, nullable=False),
    sql.Column("wished_turn", sql.Integer, nullable=False),
    sql.Column("queue", sql.Text, nullable=False),
    sql.Column("unfit", sql.Text, nullable=False),
    sql.Column("suspicion", sql.Text, nullable=False),
    sql.Column("memory", sql.Text, nullable=False),
    sql.Column("lineages", sql.Text, nullable=False),
    sql.Column("started_at", sql.String, nullable=False),
)
rounds = sql.Table(
    "rounds",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("round", sql.Integer, primary_key=True),
    sql.Column("accuracy", sql.Float, nullable=False),
    sql.Column("loss", sql.Float, nullable=False),
    sql.Column("seconds", sql.Float, nullable=False),
    sql.Column("log_time_s", sql.Float),
    sql.Column("checkpoint_sha256", sql.String, nullable=False),
    sql.Column("record", sql.Text, nullable=False),
)
evaluations = sql.Table(
    "evaluations",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("round", sql.Integer, primary_key=True),
    sql.Column("record", sql.Text, nullable=False),
)
generations = sql.Table(
    "generations",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("round", sql.Integer, primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True),
    sql.Column("record", sql.Text, nullable=False),
)
clients = sql.Table(
    "clients",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("client_id", sql.String, primary_key=True),
    sql.Column("device", sql.String, nullable=False),
    sql.Column("profile", sql.Text, nullable=False),
)
tasks = sql.Table(
    "tasks",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("round", sql.Integer, primary_key=True),
    sql.Column("work", sql.String, primary_key=True),
    sql.Column("client_id", sql.String, primary_key=True),
    sql.Column("stage", sql.String, nullable=False),
    sql.Column("reason", sql.String, nullable=False),
    sql.Column("spec", sql.String, nullable=False),
    sql.Column("bytes_down", sql.BigInteger, nullable=False),
    sql.Column("bytes_up", sql.BigInteger, nullable=False),
    sql.Column("seat", sql.Text, nullable=False),
)
programs = sql.Table(
    "programs",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("key", sql.String, primary_key=True),
    sql.Column("written", sql.Text, nullable=False),
)
updates = sql.Table(
    "updates",
    METADATA,
    sql.Column("run_id", sql.String, sql.ForeignKey("runs.run_id"), primary_key=True),
    sql.Column("round", sql.Integer, primary_key=True),
    sql.Column("client_id", sql.String, primary_key=True),
    sql.Column("task_id", sql.String, nullable=False),
    sql.Column("sha256", sql.String, nullable=False),
    sql.Column("size_bytes", sql.BigInteger, nullable=False),
    sql.Column("sample_count", sql.BigInteger, nullable=False),
    sql.Column("received_at", sql.String, nullable=False),
)


def open_database(place: Path | str) -> sql.Engine:
    """Open a database, making its tables where they are missing.

    Args:
        place: a folder in which `subfleet.sqlite` lives, or a URL of SQLAlchemy's for another database.

    Raises:
        FileError: it cannot be opened, or its tables are of another release; nothing in it is changed then.
    """
    url = place if isinstance(place, str) else f"sqlite:///{place / DATABASE_NAME}"
    try:
        engine = sql.create_engine(url)
        sql.event.listen(engine, "connect", _configure)
        _check_tables(engine, place)
        METADATA.create_all(engine)
    except sql.exc.SQLAlchemyError as error:
        raise FileError(f"the journal cannot be opened: {error.__class__.__name__}; check {place!s:.200}") from error
    return engine


def _check_tables(engine: sql.Engine, place: Path | str) -> None:
    """Make sure that those tables which are there have the columns that this release reads and writes."""
    inspector = sql.inspect(engine)
    for table in METADATA.sorted_tables:
        if not inspector.has_table(table.name):
            continue
        found = {column["name"] for column in inspector.get_columns(table.name)}
        odd = sorted(found ^ set(table.columns.keys()))
        if odd:
            raise FileError(
                f"the journal in {place!s:.200} was written by another release: of its table {table.name!r}, column "
                f"{odd[0]!r} is known to only one of both; finish its runs with that release, or choose another state "
                "folder"
            )


def _configure(connection: Any, _: ConnectionPoolEntry) -> None:
    """SQLite: readers beside one writer, and every commit on disk before it returns."""
    if isinstance(connection, sqlite3.Connection):
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
