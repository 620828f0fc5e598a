"""Looks every second at which clients of a run are away, and tells when one goes and when it comes back."""

import datetime
from collections.abc import Iterator, Mapping

import sqlalchemy as sql

from subfleet.journal.absences import AbsenceRecord, keep_absences
from subfleet.rounds.awaiting import nobody_waits
from subfleet.rounds.members import Absence, absences
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms

__all__ = ["Attendance"]

_EVERY_S = 1.0
_SAID = ("goodbye", "will", "silent")
"""Reasons that are worth a sentence: who has not been heard yet may never have gone, and a refusal is no absence."""


class Attendance:
    """Who is away, kept in the journal whenever it has changed.

    Args:
        terms: of the run.
        engine: of the journal.
    """

    def __init__(self, terms: Terms, engine: sql.Engine) -> None:
        self._terms = terms
        self._engine = engine
        self._looked_s = -_EVERY_S
        self._away: Mapping[str, Absence] = {}
        self._kept: frozenset[tuple[str, str]] | None = None

    def look(self, state: RunState, now_s: float) -> Iterator[str]:
        """Sentences on what has changed since the last look; none where that was less than a second ago.

        Raises:
            FileError: the journal cannot be written.
        """
        if 0 <= now_s - self._looked_s < _EVERY_S:
            return
        before, self._looked_s = self._away, now_s
        self._away = {one.client_id: one for one in absences(self._terms, state, now_s)}
        kinds = frozenset((name, one.kind) for name, one in self._away.items())
        if kinds == self._kept:
            return
        self._kept = kinds
        keep_absences(self._engine, self._terms.run_id, (_record(one, now_s) for one in self._away.values()))
        if state.phase in ("finished", "failed"):
            return  # then everyone leaves
        for name, one in self._away.items():
            if one.kind in _SAID and (name not in before or before[name].kind != one.kind):
                yield f"client {name} is away: {one.reason}"
        for name, one in before.items():
            if one.kind in _SAID and (name not in self._away or self._away[name].kind not in _SAID):
                yield f"client {name} is there again" if name in state.live.members else f"client {name} is forgotten"

    def awaited(self, state: RunState) -> tuple[str, ...]:
        """The clients that are away and whose answers the open round waits for: name, reason and when last heard."""
        return tuple(
            f"{name}: {one.told(self._looked_s)}"
            for name, one in self._away.items()
            if one.kind != "refused"
            and name in state.seats
            and state.seats[name].open
            and not nobody_waits(state, name)
        )


def _record(one: Absence, now_s: float) -> AbsenceRecord:
    now = datetime.datetime.now(datetime.timezone.utc)
    seen_at = None if one.seen_s is None else now - datetime.timedelta(seconds=now_s - one.seen_s)
    return AbsenceRecord(client_id=one.client_id, kind=one.kind, reason=one.reason, seen_at=seen_at)
