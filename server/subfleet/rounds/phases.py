"""From phase to phase: the only place where a run moves on, and where every deadline is kept. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from types import MappingProxyType

from subfleet.protocol.exhaustive import never
from subfleet.rounds.actions import Action, GoOn
from subfleet.rounds.answers import skip_notice
from subfleet.rounds.awaiting import (
    NO_SIZE,
    awaited_models,
    awaited_telemetry,
    closed_seats,
    collected,
    limit_s,
    telemetry_extras,
    why_missing,
    with_absence,
    with_missing,
    with_phase_closed,
    without_parted,
)
from subfleet.rounds.closing import begin_fold
from subfleet.rounds.continuing import fruitless, opened, over
from subfleet.rounds.evaluating import evaluating
from subfleet.rounds.members import SILENT_SINCE, expected, holds_lease, silent_members
from subfleet.rounds.networks import standing_for, to_begin, waits_for_programs
from subfleet.rounds.progress import (
    Aggregating,
    Deploying,
    Evaluating,
    Failed,
    Finished,
    Measuring,
    Searching,
    Training,
    Waiting,
)
from subfleet.rounds.proposing import without_late_scores
from subfleet.rounds.searching import search_due, searching
from subfleet.rounds.selection import NOT_DRAWN, selected
from subfleet.rounds.sizing import asking, lacking, sized
from subfleet.rounds.state import RunState, Seat, Submodel
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import ModelsRequest

__all__ = ["AT_ONCE", "advance"]

Outcome = tuple[RunState, tuple[Action, ...]]

AT_ONCE = 64
"""Clients whose models are asked for in one step."""


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
    match state.at:
        case Waiting():
            outcome = _waiting(terms, state, now_s)
        case Measuring():
            outcome = _measure(terms, state, now_s)
        case Training():
            outcome = _train(terms, state, now_s)
        case Evaluating():
            outcome = evaluating(terms, state, now_s)
        case Searching():
            outcome = searching(terms, state, now_s)
        case Deploying():
            outcome = _deploy(terms, state, now_s)
        case Aggregating() | Finished() | Failed():
            pass  # an event ends the one, and nothing the others
        case _:
            never(state.at)
    return outcome


def _waiting(terms: Terms, state: RunState, now_s: float) -> Outcome:
    if search_due(terms, state):
        return state.entered(Searching(), now_s), ()
    if over(terms, state):
        return _open_deploy(terms, state, now_s)
    # A strict run waits for those who went away, but begins no round on the strength of them.
    there = sum(holds_lease(terms, state.live.members[name], now_s) for name in expected(terms, state, now_s))
    if there >= terms.config.min_clients:
        paused = state.round > state.folded_round and now_s - state.live.entered_s < state.live.retries.pause_s
        return (state if paused else opened(state, now_s)), ()
    if now_s - state.live.entered_s < terms.config.deadlines.join_s:
        return state, ()
    failure = (
        f"{there} of {terms.config.min_clients} clients were there after {terms.config.deadlines.join_s:g} s; "
        "start more clients or lower min_clients"
    )
    return state.failed(failure, now_s), ()


def _measure(terms: Terms, state: RunState, now_s: float) -> Outcome:
    late = now_s - state.live.entered_s >= limit_s(terms, "telemetry")
    there = len(state.seats) + telemetry_extras(terms, state, now_s)
    few = not state.seats or there < terms.config.min_clients
    if not late and (few or next(awaited_telemetry(terms, state, now_s), None) is not None):
        return state, ()
    if wanted := to_begin(terms, state):
        if now_s - state.live.entered_s < terms.config.deadlines.measure_s + terms.config.deadlines.round_s:
            return asking(state, wanted)
        state, _ = closed_seats(state, dict.fromkeys(_open(state), NO_SIZE))
        return fruitless(terms, state, now_s), ()
    missed = [name for name in sorted(expected(terms, state, now_s)) if name not in state.seats]
    silent = [name for name in silent_members(state) if name not in missed]
    reasons = {name: why_missing(terms, state, name, "telemetry", now_s, late) for name in missed}
    members = state.live.members
    since = {name: members[name].silent_since or state.round for name in (*missed, *silent)}
    members = members.updated({name: replace(members[name], silent_since=number) for name, number in since.items()})
    state = replace(state, live=replace(state.live, members=members))
    if not state.seats:
        return _unanswered(terms, state, now_s)
    state = with_missing(state, missed, "telemetry")
    reasons |= {name: f"{SILENT_SINCE} {since[name]}" for name in silent}
    seats = {**state.seats, **{name: _missing_seat(state, name, reason) for name, reason in reasons.items()}}
    return _assign(terms, replace(state, seats=MappingProxyType(seats)), now_s)


def _unanswered(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Wait for clients anew, but not for ever: some may give signs of life and yet never say what they can give."""
    if now_s - state.live.opened_s < terms.config.deadlines.join_s:
        return state.entered(Waiting(), now_s), ()
    failure = (
        f"no client answered the announcement of round {state.round} within {terms.config.deadlines.join_s:g} s; "
        "see the clients' logs, or raise measure_s"
    )
    return state.failed(failure, now_s), ()


def _missing_seat(state: RunState, client_id: str, reason: str) -> Seat:
    profile = state.profiles.get(client_id)
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
    state = state.entered(Training(), now_s)
    return replace(state, seats=MappingProxyType(dict(sorted({**state.seats, **left_out}.items())))), ()


def _train(terms: Terms, state: RunState, now_s: float) -> Outcome:
    state, unscored = (state, ()) if lacking(terms, state) else without_late_scores(terms, state, now_s)
    state, given = sized(terms, state)
    state, parted = without_parted(terms, state, now_s)
    first = (*unscored, *given, *parted)
    collection = collected(terms, state, "training", now_s)
    if not collection.closes or (not collection.late and waits_for_programs(terms, state)):
        return state, first
    state, actions = with_phase_closed(terms, state, "training", collection, now_s)
    if not any(seat.stage == "done" for seat in state.seats.values()):
        # Where the next try begins at once, nobody would be told after this step.
        notices = [notice for seat in state.seats.values() for notice in skip_notice(seat)]
        return fruitless(terms, state, now_s), (*first, *actions, *notices)
    state, last = begin_fold(terms, state, now_s)
    return state, (*first, *actions, *last)


def _open(state: RunState) -> Iterator[str]:
    return (name for name, seat in state.seats.items() if seat.open)


def _open_deploy(terms: Terms, state: RunState, now_s: float) -> Outcome:
    if not terms.config.deploy_targets or not state.last:
        return state.entered(Finished(), now_s), ()
    return replace(state, seats=MappingProxyType({})).entered(Deploying(), now_s), ()


def _deploy_seat(terms: Terms, state: RunState, last: Seat) -> Seat:
    """The seat of a client that is to have its own models: of the network that stands for that which it trained."""
    client = standing_for(terms, state, last)
    return replace(
        last,
        attempt=0,
        stage="preparing" if client else "skipped",
        reason="" if client else "its network has retired, and the method names no other for it",
        given=Submodel(size=client.size, spec=client.spec) if client else last.given,
        task=None,
        trained=None,
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
    unfetched = "it did not fetch its models in time"
    reasons = {name: with_absence(terms, state, name, unfetched, now_s) for name in _open(state)}
    state, closed = closed_seats(state, reasons)
    return state.entered(Finished(), now_s), (*parted, *closed)
