"""Tracks which clients of a run are away, and why."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from subfleet.journal.journal import AbsenceRecord, Journal
from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import Duty
from subfleet.rounds.members import explain_away
from subfleet.rounds.state import RunState

_EVERY_S = 1.0
_REPORTED = ("goodbye", "will", "silent")
"""Kinds of absence that are reported. A client that has not sent anything yet may be there, and a client that refused
a task is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A client that is away, or has refused its task.

    Attributes:
        kind: of the reason.
        reason: in words.
        seen_s: monotonic time of its last sign of life; None if this server has not heard it.
    """

    client_id: str
    kind: Literal["goodbye", "will", "unheard", "silent", "refused"]
    reason: str
    seen_s: float | None

    def describe(self, now_s: float) -> str:
        """The reason, and how long ago the client was heard last unless the reason says so."""
        if self.kind not in ("goodbye", "will") or self.seen_s is None:
            return self.reason
        return f"{self.reason}, last seen {now_s - self.seen_s:.0f} s ago"


def list_absences(context: RunContext, state: RunState, now_s: float) -> Iterator[Absence]:
    """The clients of the run that are away, or have refused their task in the open round, sorted."""
    for name, member in sorted(state.live.members.items()):
        if name not in state.profiles or not (member.session_id or name in state.last):
            continue
        client, reason = state.clients.get(name), explain_away(context, member, now_s)
        kind: Literal["goodbye", "will", "unheard", "silent", "refused"] = "silent"
        seen_s = member.heard_s
        if member.gone:
            kind, seen_s = member.gone, member.noted_s
        elif member.heard_s is None:
            kind = "unheard"
        elif not reason and client is not None and client.stage == "refused":
            kind, reason = "refused", f"refused: {client.reason}"
        if reason:
            yield Absence(client_id=name, kind=kind, reason=reason, seen_s=seen_s)


def is_unawaited(state: RunState, client_id: str) -> bool:
    """Whether the open phase does not wait for this client once another one has answered."""
    duties: Mapping[str, Duty] = {"train": "training", "evaluate": "evaluation", "search": "paths"}
    duty = duties.get(state.phase)
    return duty is not None and not get_punctuality(state, client_id, duty).awaited


class Attendance:
    """Tracks absent clients, and writes changes to the journal."""

    def __init__(self, context: RunContext, journal: Journal) -> None:
        self._context = context
        self._journal = journal
        self._checked_s = -_EVERY_S
        self._away: Mapping[str, Absence] = {}
        self._saved: frozenset[tuple[str, str]] | None = None

    def check(self, state: RunState, now_s: float) -> Iterator[str]:
        """Sentences about changes since the last call; nothing within a second of it.

        Raises:
            FileError: the journal cannot be written.
        """
        if 0 <= now_s - self._checked_s < _EVERY_S:
            return
        before, self._checked_s = self._away, now_s
        self._away = {absence.client_id: absence for absence in list_absences(self._context, state, now_s)}
        kinds = frozenset((name, absence.kind) for name, absence in self._away.items())
        if kinds == self._saved:
            return
        self._saved = kinds
        self._journal.save_absences(_build_record(absence, now_s) for absence in self._away.values())
        if state.phase in ("finished", "failed"):
            return  # all clients leave
        for name, absence in self._away.items():
            if absence.kind in _REPORTED and (name not in before or before[name].kind != absence.kind):
                yield f"client {name} is away: {absence.reason}"
        for name, absence in before.items():
            if absence.kind in _REPORTED and (name not in self._away or self._away[name].kind not in _REPORTED):
                yield f"client {name} is there again" if name in state.live.members else f"client {name} is forgotten"

    def awaited(self, state: RunState) -> tuple[str, ...]:
        """The absent clients that the round waits for: name, reason and time of the last message."""
        return tuple(
            f"{name}: {absence.describe(self._checked_s)}"
            for name, absence in self._away.items()
            if absence.kind != "refused"
            and name in state.clients
            and state.clients[name].open
            and not is_unawaited(state, name)
        )


def _build_record(absence: Absence, now_s: float) -> AbsenceRecord:
    seen_at = None if absence.seen_s is None else time.time() - (now_s - absence.seen_s)
    return AbsenceRecord(client_id=absence.client_id, kind=absence.kind, reason=absence.reason, seen_at=seen_at)
