"""What follows from a device's refusal of a task: a smaller one, or nothing more in this round. Pure."""

from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.messages import Refusal
from subfleet.protocol.text import printable
from subfleet.rounds.actions import Action
from subfleet.rounds.reasons import REFUSALS, Lasts, nothing_left
from subfleet.rounds.seating import MOST_CHARACTERS, ask_of, choose_below
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms

__all__ = ["lasting_of", "reason_of", "refused_seat", "with_less", "with_room"]


def reason_of(refusal: Refusal) -> str:
    """A refusal in words that may be shown in terminals, where control characters act."""
    return f"{refusal.reason}: {printable(refusal.detail)}"[:MOST_CHARACTERS]


def refused_seat(terms: Terms, state: RunState, seat: Seat, refusal: Refusal) -> tuple[Seat, tuple[Action, ...]]:
    """A smaller task after a refusal that a smaller one may mend, while there is one and attempts are left.

    Else the seat is refused. What a device cannot run at all is told by the state.
    """
    course = REFUSALS[refusal.reason]
    final = replace(seat, stage="refused", reason=reason_of(refusal))
    if state.phase != "train":
        return final, ()
    if course.limit is not None and seat.attempt + 1 < terms.config.max_attempts and seat.offer.budget and seat.size:
        smaller = with_less(replace(seat, attempt=seat.attempt + 1), refusal)
        chosen, actions = choose_below(terms, state, smaller, course.limit)
        if chosen.open:
            return chosen, actions
    lasts = lasting_of(terms, state, seat) if course.of_program else course.lasts
    return replace(final, lasts=lasts), ()


def lasting_of(terms: Terms, state: RunState, seat: Seat) -> Lasts:
    """Whether a device to which a program could not be given, or of which it was refused, has nothing else left."""
    ask = ask_of(terms, state, seat)
    assigned = terms.roles.assigner.assign(ask)
    left = assigned.candidate is not None or not nothing_left(ask, assigned.only)
    return "passing" if left else "lasting"


def with_less(seat: Seat, refusal: Refusal) -> Seat:
    """The seat with no more in its budget than a refusal says that there is."""
    available_bytes = refusal.available_bytes
    if seat.offer.budget is None or available_bytes is None:
        return seat
    there_bytes, budget = max(0, available_bytes), seat.offer.budget
    if refusal.reason == "memory":
        return replace(
            seat, offer=replace(seat.offer, budget=replace(budget, memory_bytes=min(budget.memory_bytes, there_bytes)))
        )
    if refusal.reason == "disk":
        told_bytes = there_bytes if budget.disk_bytes is None else min(budget.disk_bytes, there_bytes)
        return replace(seat, offer=replace(seat.offer, budget=replace(budget, disk_bytes=told_bytes)))
    return seat


def with_room(state: RunState, refusal: Refusal) -> RunState:
    """The state that knows what may be written to a device's disk, for rounds in which it does not tell."""
    if refusal.reason != "disk" or refusal.available_bytes is None:
        return state
    known = {**state.disks, refusal.client_id: max(0, refusal.available_bytes)}
    return replace(state, disks=MappingProxyType(known))
