"""The one door through which a journal is read: what is damaged in it ends as one typed error.

SQLite finds pages that cannot be right, and nothing else: it lets values of any type be in any column, and a flipped
byte in a text is another text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sql

from subfleet.protocol.errors import FileError, ProtocolError, SubfleetError
from subfleet.protocol.plugins import explain_plugin_error

__all__ = ["connected", "place_of", "typed_rows", "typed_scalars", "understood"]


def place_of(engine: sql.Engine) -> str:
    """Where a journal is, without the password of its URL."""
    return engine.url.database or engine.url.render_as_string()


@contextmanager
def understood(place: object) -> Iterator[None]:
    """Work on what a journal holds: whatever fails in it is damage of that journal.

    Args:
        place: of the journal.

    Raises:
        FileError: the journal holds what this release cannot read.
        SubfleetError: any other one that is raised within.
    """
    try:
        yield
    except ProtocolError as error:
        raise _damaged(place, str(error)) from error
    except SubfleetError:
        raise
    except Exception as error:
        if explain_plugin_error(error):
            raise
        # A flipped byte fails in as many ways as there are lines that work with what was read.
        raise _damaged(place, f"{type(error).__name__}: {error}") from error


@contextmanager
def connected(engine: sql.Engine) -> Iterator[sql.Connection]:
    """A connection to read with, see `understood`, which says what is raised."""
    with understood(place_of(engine)), engine.connect() as connection:
        yield connection


def typed_rows(connection: sql.Connection, query: sql.Select[Any]) -> Iterator[sql.Row[Any]]:
    """The rows that a query finds, each value of its column's type.

    Raises:
        ProtocolError: one has another type.
    """
    columns = tuple(query.selected_columns)
    for row in connection.execute(query):
        for column, value in zip(columns, row, strict=True):
            if not _fits(column, value):
                raise ProtocolError(f"{column} is {value!r:.80}, but must be of the type {column.type}")
        yield row


def typed_scalars(connection: sql.Connection, query: sql.Select[Any]) -> Iterator[Any]:
    """The values of the one column that a query asks for; see `typed_rows`, which says what is raised."""
    return (value for (value,) in typed_rows(connection, query))


def _fits(column: sql.ColumnElement[Any], value: object) -> bool:
    if value is None:
        return bool(getattr(column, "nullable", True))
    wanted = column.type.python_type
    return isinstance(value, (int, float) if wanted is float else wanted)


def _damaged(place: object, why: str) -> FileError:
    return FileError(
        f"the journal in {place!s:.200} is damaged, or was written by another release: {' '.join(why.split()):.200}; "
        "restore it from a backup, or choose another folder"
    )
