"""Which clients of a run are away, as people who ask the journal are told: since when, and why."""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sqlalchemy as sql

from subfleet.journal.database import absences
from subfleet.journal.reading import connected, typed_rows
from subfleet.protocol.errors import ProtocolError

__all__ = ["AbsenceRecord", "keep_absences", "kept_absences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsenceRecord:
    """A client that is away, or has refused its task in the open round.

    Attributes:
        kind: of the reason, see `subfleet.rounds.members.Absence`.
        reason: in words.
        seen_at: when it was heard last; None where the server has not heard it since it started.
    """

    client_id: str
    kind: str
    reason: str
    seen_at: datetime.datetime | None

    def told(self, now: datetime.datetime) -> str:
        """The reason, at this time."""
        if self.kind != "silent" or self.seen_at is None:
            return self.reason
        return f"no heartbeat for {(now - self.seen_at).total_seconds():.0f} s"


def keep_absences(engine: sql.Engine, run_id: str, away: Iterable[AbsenceRecord]) -> None:
    """Write who is away now in place of those before.

    Raises:
        FileError: the database cannot be written.
    """
    rows = [
        {
            "run_id": run_id,
            "client_id": one.client_id,
            "kind": one.kind,
            "reason": one.reason,
            "seen_at": None if one.seen_at is None else one.seen_at.isoformat(timespec="milliseconds"),
        }
        for one in away
    ]
    with engine.begin() as connection:
        connection.execute(absences.delete().where(absences.c.run_id == run_id))
        if rows:
            connection.execute(absences.insert(), rows)


def kept_absences(engine: sql.Engine, run_id: str) -> Mapping[str, AbsenceRecord]:
    """Who is away, by id.

    Raises:
        FileError: the database is damaged.
    """
    query = sql.select(absences).where(absences.c.run_id == run_id).order_by(absences.c.client_id)
    with connected(engine) as connection:
        return MappingProxyType(
            {
                row.client_id: AbsenceRecord(
                    client_id=row.client_id,
                    kind=row.kind,
                    reason=row.reason,
                    seen_at=None if row.seen_at is None else _time_of(row.seen_at),
                )
                for row in typed_rows(connection, query)
            }
        )


def _time_of(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ProtocolError(f"seen_at is {text!r:.80}, but must be a time with its time zone")
    return time
