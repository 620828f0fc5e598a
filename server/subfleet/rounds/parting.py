"""Seats of clients that are away: who has said goodbye is waited for no more, and a missing seat says why. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.actions import Action, Withdraw
from subfleet.rounds.members import has_left, reason_away
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms

__all__ = ["closed_seats", "with_absence", "without_parted"]

Outcome = tuple[RunState, tuple[Action, ...]]


def without_parted(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """The state in which the open seats of clients that have said goodbye are missing, see `members.has_left`."""
    gone = (name for name, member in state.members.items() if has_left(terms, member, now_s))
    left = [seat for name in sorted(gone) if (seat := state.seats.get(name)) is not None and seat.open]
    reasons = {seat.client_id: reason_away(terms, state.members[seat.client_id], now_s) for seat in left}
    return closed_seats(state, left, reasons) if left else (state, ())


def closed_seats(state: RunState, seats: Iterable[Seat], reasons: Mapping[str, str]) -> Outcome:
    """The state in which these seats are missing, for the reason of each, and their tasks are withdrawn."""
    closed = {seat.client_id: replace(seat, stage="missing", reason=reasons[seat.client_id]) for seat in seats}
    actions = tuple(Withdraw(task_id=seat.task.task_id) for seat in closed.values() if seat.task is not None)
    return replace(state, seats=MappingProxyType({**state.seats, **closed})), actions


def with_absence(terms: Terms, state: RunState, client_id: str, reason: str, now_s: float) -> str:
    """A reason why a client is missing, and where it is away, why that is so."""
    member = state.members.get(client_id)
    away = "" if member is None else reason_away(terms, member, now_s)
    return f"{reason}: {away}" if away else reason
