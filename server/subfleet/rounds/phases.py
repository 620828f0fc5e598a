"""From phase to phase: the only place where a run moves on, and where every deadline is kept. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import nsmallest
from itertools import islice
from types import MappingProxyType

from subfleet.protocol.exhaustive import never
from subfleet.rounds.actions import Action, GoOn
from subfleet.rounds.awaiting import (
    awaited,
    awaited_models,
    awaited_telemetry,
    telemetry_extras,
    why_closed,
    with_misses,
    with_missing,
)
from subfleet.rounds.beginning import to_begin
from subfleet.rounds.closing import begin_fold
from subfleet.rounds.counting import waits_for_programs
from subfleet.rounds.ending import over
from subfleet.rounds.evaluating import evaluating
from subfleet.rounds.members import SILENT_SINCE, expected, holds_lease, silent_members
from subfleet.rounds.networks import standing_for
from subfleet.rounds.notices import skip_notice
from subfleet.rounds.parting import closed_seats, with_absence, without_parted
from subfleet.rounds.proposing import without_late_scores
from subfleet.rounds.retrying import fruitless, opened
from subfleet.rounds.searching import search_due, searching
from subfleet.rounds.selection import NOT_DRAWN, selected
from subfleet.rounds.sizing import asking, lacking, sized
from subfleet.rounds.state import Phase, RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import ModelsRequest

__all__ = ["AT_ONCE", "advance"]

Outcome = tuple[RunState, tuple[Action, ...]]

AT_ONCE = 64
"""Clients whose models are asked for in one step."""
_NO_SIZE = "no size was chosen for it in time"
"""Why a client is missing that has answered: what is needed to choose one was not made before the deadline."""


def advance(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Move on until the phase has to wait for something."""
    actions: tuple[Action, ...] = ()
    while True:
        before = state.phase
        state, more = _moved(terms, state, now_s)
        actions += more
        if state.phase == before:
            return state, actions


def _moved(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """What the phase comes to now."""
    outcome: Outcome = state, ()
    match state.phase:
        case "waiting":
            outcome = _waiting(terms, state, now_s)
        case "measure":
            outcome = _measure(terms, state, now_s)
        case "train":
            outcome = _train(terms, state, now_s)
        case "evaluate":
            outcome = evaluating(terms, state, now_s)
        case "search":
            outcome = searching(terms, state, now_s)
        case "deploy":
            outcome = _deploy(terms, state, now_s)
        case "fold" | "finished" | "failed":
            pass  # an event ends the one, and nothing the others
        case _:
            never(state.phase)
    return outcome


def _enter(state: RunState, phase: Phase, now_s: float) -> RunState:
    return replace(state, phase=phase, entered_s=now_s)


def _waiting(terms: Terms, state: RunState, now_s: float) -> Outcome:
    if search_due(terms, state):
        return _enter(state, "search", now_s), ()
    if over(terms, state):
        return _open_deploy(terms, state, now_s)
    # A strict run waits for those who went away, but begins no round on the strength of them.
    there = sum(holds_lease(terms, state.members[name], now_s) for name in expected(terms, state, now_s))
    if there >= terms.config.min_clients:
        paused = state.round > state.folded_round and now_s - state.entered_s < state.tries.pause_s
        return (state if paused else opened(state, now_s)), ()
    if now_s - state.entered_s < terms.config.deadlines.join_s:
        return state, ()
    failure = (
        f"{there} of {terms.config.min_clients} clients were there after {terms.config.deadlines.join_s:g} s; "
        "start more clients or lower min_clients"
    )
    return _enter(replace(state, failure=failure), "failed", now_s), ()


def _measure(terms: Terms, state: RunState, now_s: float) -> Outcome:
    late = now_s - state.entered_s >= terms.config.deadlines.measure_s
    there = len(state.seats) + telemetry_extras(terms, state, now_s)
    few = not state.seats or there < terms.config.min_clients
    if not late and (few or next(awaited_telemetry(terms, state, now_s), None) is not None):
        return state, ()
    if wanted := to_begin(terms, state):
        if now_s - state.entered_s < terms.config.deadlines.measure_s + terms.config.deadlines.round_s:
            return asking(state, wanted)
        unsized = {name: "" for name, seat in state.seats.items() if seat.open}
        state, _ = _close_open_seats(terms, state, unsized, now_s)
        return fruitless(terms, state, now_s), ()
    missed = [name for name in sorted(expected(terms, state, now_s)) if name not in state.seats]
    silent = [name for name in silent_members(state) if name not in missed]
    reasons = {name: with_absence(terms, state, name, _untold(terms, state, name, late=late), now_s) for name in missed}
    since = {name: state.members[name].silent_since or state.round for name in (*missed, *silent)}
    members = {name: replace(state.members[name], silent_since=number) for name, number in since.items()}
    state = replace(state, members=state.members.updated(members))
    if not state.seats:
        return _unanswered(terms, state, now_s)
    state = with_missing(state, missed, "telemetry")
    reasons |= {name: f"{SILENT_SINCE} {since[name]}" for name in silent}
    seats = {**state.seats, **{name: _missing_seat(state, name, reason) for name, reason in reasons.items()}}
    return _assign(terms, replace(state, seats=MappingProxyType(seats)), now_s)


def _untold(terms: Terms, state: RunState, client_id: str, *, late: bool) -> str:
    """Why a client is missing that has not told what it can give."""
    usual = "no telemetry came in time"
    return usual if late else why_closed(terms, state, client_id, "telemetry", usual)


def _unanswered(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Wait for clients anew, but not for ever: some may give signs of life and yet never say what they can give."""
    if now_s - state.opened_s < terms.config.deadlines.join_s:
        return _enter(state, "waiting", now_s), ()
    failure = (
        f"no client answered the announcement of round {state.round} within {terms.config.deadlines.join_s:g} s; "
        "see the clients' logs, or raise measure_s"
    )
    return _enter(replace(state, failure=failure), "failed", now_s), ()


def _missing_seat(state: RunState, client_id: str, reason: str) -> Seat:
    profile = state.members[client_id].profile
    device = profile.device if profile is not None else ""
    return Seat(client_id=client_id, device=device, stage="missing", reason=reason)


def _assign(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Who was not chosen is left out; the others are given sizes while the phase goes on."""
    state, drawn = selected(terms, state)
    left_out = {
        name: replace(seat, stage="skipped", reason=NOT_DRAWN)
        for name, seat in state.seats.items()
        if seat.stage == "answered" and name not in drawn
    }
    state = _enter(state, "train", now_s)
    return replace(state, seats=MappingProxyType(dict(sorted({**state.seats, **left_out}.items())))), ()


def _train(terms: Terms, state: RunState, now_s: float) -> Outcome:
    state, unscored = (state, ()) if lacking(terms, state) else without_late_scores(terms, state, now_s)
    state, given = sized(terms, state)
    state, parted = without_parted(terms, state, now_s)
    first = (*unscored, *given, *parted)
    still_open = [seat for seat in state.seats.values() if seat.open]
    late = now_s - state.entered_s >= terms.config.deadlines.round_s
    waits_for = () if late else tuple(_awaited_training(terms, state, now_s))
    done = sum(seat.stage == "done" for seat in state.seats.values())
    answered = done + sum(seat.stage == "refused" for seat in state.seats.values())
    enough = done > 0 and answered >= math.ceil(terms.config.quorum * (answered + len(waits_for)))
    if waits_for and not (enough and not terms.config.strict):
        return state, first
    if not late and waits_for_programs(terms, state):
        return state, first
    reasons = {seat.client_id: _unanswered_task(terms, state, seat, late=late) for seat in still_open}
    state, actions = _close_open_seats(terms, state, reasons, now_s)
    state = with_misses(state, "training", spared=(seat.client_id for seat in waits_for))
    if not any(seat.stage == "done" for seat in state.seats.values()):
        # Where the next try begins at once, nobody would be told after this step.
        notices = [notice for seat in state.seats.values() for notice in skip_notice(seat)]
        return fruitless(terms, state, now_s), (*first, *actions, *notices)
    state, last = begin_fold(terms, state, now_s)
    return state, (*first, *actions, *last)


def _awaited_training(terms: Terms, state: RunState, now_s: float) -> Iterator[Seat]:
    """The seats that a round waits for; of a strict run the first, since it closes with none of them open."""
    return islice(awaited(terms, state, "training", now_s), 1 if terms.config.strict else None)


def _unanswered_task(terms: Terms, state: RunState, seat: Seat, *, late: bool) -> str:
    if late:
        return "no answer came in time"
    return why_closed(terms, state, seat.client_id, "training", "the round closed at its quorum")


def _close_open_seats(terms: Terms, state: RunState, reasons: Mapping[str, str], now_s: float) -> Outcome:
    """Close the seats of these clients, each for its reason."""
    seats = [state.seats[name] for name in reasons]
    told = {
        seat.client_id: _NO_SIZE
        if seat.stage == "answered"
        else with_absence(terms, state, seat.client_id, reasons[seat.client_id], now_s)
        for seat in seats
    }
    return closed_seats(state, seats, told)


def _open_deploy(terms: Terms, state: RunState, now_s: float) -> Outcome:
    if not terms.config.deploy_targets or not state.last:
        return _enter(state, "finished", now_s), ()
    return _enter(replace(state, seats=MappingProxyType({})), "deploy", now_s), ()


def _deploy_seat(terms: Terms, state: RunState, last: Seat) -> Seat:
    """The seat of a client that is to have its own models: of the network that stands for that which it trained."""
    client = standing_for(terms, state, last)
    return replace(
        last,
        attempt=0,
        stage="preparing" if client else "skipped",
        reason="" if client else "its network has retired, and the method names no other for it",
        size=client.size if client else last.size,
        spec=client.spec if client else last.spec,
        task=None,
        result=None,
    )


def _deploy(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Have models made for the next few, and end the phase where nothing more is to be waited for."""
    names = nsmallest(AT_ONCE + 1, state.last.keys() - state.seats.keys())
    if names:
        new = {name: _deploy_seat(terms, state, state.last[name]) for name in names[:AT_ONCE]}
        wanted = [seat.participant for seat in new.values() if seat.stage == "preparing"]
        actions = tuple(ModelsRequest(participant=one, round=state.round) for one in wanted if one is not None)
        more = (GoOn(),) if len(names) > AT_ONCE else ()
        return replace(state, seats=MappingProxyType({**state.seats, **new})), (*actions, *more)
    state, parted = without_parted(terms, state, now_s)
    if next(awaited_models(terms, state, now_s), None) is not None:
        return state, parted
    unfetched = {name: "it did not fetch its models in time" for name, seat in state.seats.items() if seat.open}
    state, closed = _close_open_seats(terms, state, unfetched, now_s)
    return _enter(state, "finished", now_s), (*parted, *closed)
