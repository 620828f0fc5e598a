"""Tracks which clients of a run are away, and why."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping

from subfleet.journal.base import AbsenceRecord, RunJournal
from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import Duty, FleetMember
from subfleet.rounds.members import explain_away
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.state import RunState

_EVERY_S = 1.0
_REPORTED = ("goodbye", "will", "silent")
"""Kinds of absence that are reported. A client that has not sent anything yet may be there, and a client that refused
a task is there."""


def list_absences(
    context: RunContext, state: RunState, now_s: float, now: float, names: Iterable[str] | None = None
) -> Iterator[AbsenceRecord]:
    """The clients of the run that are away, or have refused their task in the open round, sorted.

    Args:
        context: of the run.
        state: of the run.
        now_s: monotonic time.
        now: the same as POSIX time.
        names: the clients that may be away; None means all.
    """
    members = state.live.members
    names = members if names is None else names
    for name, member in ((name, members[name]) for name in sorted(names) if name in members and name in state.profiles):
        if not (member.session_id or name in state.last):
            continue
        client, reason = state.clients.get(name), explain_away(context, member, now_s)
        kind, seen_s = "silent", member.heard_s
        if member.departure:
            kind, seen_s = member.departure, member.noted_s
        elif member.heard_s is None:
            kind = "unheard"
        elif not reason and client is not None and client.stage == "refused":
            kind, reason = "refused", f"refused: {client.reason}"
        if reason:
            seen_at = None if seen_s is None else now - (now_s - seen_s)
            yield AbsenceRecord(client_id=name, kind=kind, reason=reason, seen_at=seen_at)


def is_unawaited(state: RunState, client_id: str) -> bool:
    """Whether the open phase does not wait for this client once another one has answered."""
    duties: Mapping[str, Duty] = {"train": "training", "evaluate": "evaluation", "search": "paths"}
    duty = duties.get(state.phase)
    return duty is not None and not get_punctuality(state, client_id, duty).awaited


class Attendance:
    """Tracks absent clients, and writes changes to the journal."""

    def __init__(self, context: RunContext, journal: RunJournal) -> None:
        self._context = context
        self._journal = journal
        self._checked_s = -_EVERY_S
        self._checked_at = 0.0
        self._members = PersistentMap[FleetMember]()
        self._until_s = -math.inf  # no client that was there can have become silent before
        self._away: Mapping[str, AbsenceRecord] = {}
        self._saved: frozenset[tuple[str, str]] | None = None

    def check(self, state: RunState, now_s: float) -> Iterator[str]:
        """Sentences about changes since the last call; nothing within a second of it.

        Raises:
            FileError: the journal cannot be written.
        """
        if 0 <= now_s - self._checked_s < _EVERY_S:
            return
        before, self._checked_s, self._checked_at = self._away, now_s, time.time()
        absences = list_absences(self._context, state, now_s, self._checked_at, self._list_candidates(state, now_s))
        self._away = {absence.client_id: absence for absence in absences}
        kinds = frozenset((name, absence.kind) for name, absence in self._away.items())
        if kinds == self._saved:
            return
        self._saved = kinds
        self._journal.save_absences(self._away.values())
        if state.phase in ("finished", "failed"):
            return  # all clients leave
        for name, absence in self._away.items():
            if absence.kind in _REPORTED and (name not in before or before[name].kind != absence.kind):
                yield f"client {name} is away: {absence.reason}"
        for name, absence in before.items():
            if absence.kind in _REPORTED and (name not in self._away or self._away[name].kind not in _REPORTED):
                yield f"client {name} is back" if name in state.live.members else f"client {name} is forgotten"

    def _list_candidates(self, state: RunState, now_s: float) -> Iterable[str]:
        """The clients that may be away: those that were, and those that were heard, or may have fallen silent since."""
        members, known, lease_s = state.live.members, self._members, self._context.config.deadlines.lease_s
        self._members = members
        if now_s > self._until_s:
            until_s = (member.heard_s + lease_s for _, member in members.items() if member.heard_s is not None)
            self._until_s = min((at_s for at_s in until_s if at_s >= now_s), default=math.inf)
            return members
        refused = (name for name, client in state.clients.items() if client.stage == "refused")
        return {*self._away, *members.find_changed(known), *refused}

    def list_awaited(self, state: RunState) -> tuple[str, ...]:
        """The absent clients that the round waits for: name, reason and time of the last message."""
        return tuple(
            f"{name}: {_describe(absence, self._checked_at)}"
            for name, absence in self._away.items()
            if absence.kind != "refused"
            and name in state.clients
            and state.clients[name].open
            and not is_unawaited(state, name)
        )


def _describe(absence: AbsenceRecord, now: float) -> str:
    """The reason, and how long ago the client was heard last unless the reason says so."""
    if absence.kind not in ("goodbye", "will") or absence.seen_at is None:
        return absence.reason
    return f"{absence.reason}, last seen {now - absence.seen_at:.0f} s ago"
