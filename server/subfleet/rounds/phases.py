"""From phase to phase: the only place where a run moves on, and where every deadline is kept. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from types import MappingProxyType

from subfleet.protocol.exhaustive import never
from subfleet.rounds.awaiting import (
    NO_SIZE,
    awaited_models,
    awaited_telemetry,
    closed_clients,
    collected,
    limit_s,
    telemetry_extras,
    why_missing,
    with_absence,
    with_missing,
    with_phase_closed,
    without_parted,
)
from subfleet.rounds.closing import begin_aggregation
from subfleet.rounds.context import RunContext
from subfleet.rounds.continuing import fruitless, opened, over
from subfleet.rounds.evaluating import evaluating
from subfleet.rounds.judging import skip_notice
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
from subfleet.rounds.searching import search_due, searching
from subfleet.rounds.selection import NOT_DRAWN, selected
from subfleet.rounds.signals import Action, GoOn, Outcome
from subfleet.rounds.sizing import asking, lacking, sized, without_late_scores
from subfleet.rounds.state import ClientState, RunState, Submodel
from subfleet.rounds.work import ModelsRequest

AT_ONCE = 64
"""Clients whose models are asked for in one step."""


def advance(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Move on until the phase has to wait for something."""
    actions: tuple[Action, ...] = ()
    while True:
        before = state.phase
        state, more = _moved(context, state, now_s)
        actions += more
        if state.phase == before:
            return state, actions


def _moved(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """What the phase comes to now."""
    outcome: Outcome = state, ()
    match state.at:
        case Waiting():
            outcome = _waiting(context, state, now_s)
        case Measuring():
            outcome = _measure(context, state, now_s)
        case Training():
            outcome = _train(context, state, now_s)
        case Evaluating():
            outcome = evaluating(context, state, now_s)
        case Searching():
            outcome = searching(context, state, now_s)
        case Deploying():
            outcome = _deploy(context, state, now_s)
        case Aggregating() | Finished() | Failed():
            pass  # an event ends the one, and nothing the others
        case _:
            never(state.at)
    return outcome


def _waiting(context: RunContext, state: RunState, now_s: float) -> Outcome:
    if search_due(context, state):
        return state.entered(Searching(), now_s), ()
    if over(context, state):
        return _open_deploy(context, state, now_s)
    # A strict run waits for those who went away, but begins no round on the strength of them.
    there = sum(holds_lease(context, state.live.members[name], now_s) for name in expected(context, state, now_s))
    if there >= context.config.min_clients:
        paused = state.round > state.aggregated_round and now_s - state.live.entered_s < state.live.retries.pause_s
        return (state if paused else opened(state, now_s)), ()
    if now_s - state.live.entered_s < context.config.deadlines.join_s:
        return state, ()
    failure = (
        f"{there} of {context.config.min_clients} clients were there after {context.config.deadlines.join_s:g} s; "
        "start more clients or lower min_clients"
    )
    return state.failed(failure, now_s), ()


def _measure(context: RunContext, state: RunState, now_s: float) -> Outcome:
    late = now_s - state.live.entered_s >= limit_s(context, "telemetry")
    there = len(state.clients) + telemetry_extras(context, state, now_s)
    few = not state.clients or there < context.config.min_clients
    if not late and (few or next(awaited_telemetry(context, state, now_s), None) is not None):
        return state, ()
    if wanted := to_begin(context, state):
        if now_s - state.live.entered_s < context.config.deadlines.measure_s + context.config.deadlines.round_s:
            return asking(state, wanted)
        state, _ = closed_clients(state, dict.fromkeys(_open(state), NO_SIZE))
        return fruitless(context, state, now_s), ()
    missed = [name for name in sorted(expected(context, state, now_s)) if name not in state.clients]
    silent = [name for name in silent_members(state) if name not in missed]
    reasons = {name: why_missing(context, state, name, "telemetry", now_s, late) for name in missed}
    members = state.live.members
    since = {name: members[name].silent_since or state.round for name in (*missed, *silent)}
    members = members.updated({name: replace(members[name], silent_since=number) for name, number in since.items()})
    state = replace(state, live=replace(state.live, members=members))
    if not state.clients:
        return _unanswered(context, state, now_s)
    state = with_missing(state, missed, "telemetry")
    reasons |= {name: f"{SILENT_SINCE} {since[name]}" for name in silent}
    clients = {**state.clients, **{name: _missing_client(state, name, reason) for name, reason in reasons.items()}}
    return _assign(context, replace(state, clients=MappingProxyType(clients)), now_s)


def _unanswered(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Wait for clients anew, but not for ever: some may give signs of life and yet never say what they can give."""
    if now_s - state.live.opened_s < context.config.deadlines.join_s:
        return state.entered(Waiting(), now_s), ()
    failure = (
        f"no client answered the announcement of round {state.round} within {context.config.deadlines.join_s:g} s; "
        "see the clients' logs, or raise measure_s"
    )
    return state.failed(failure, now_s), ()


def _missing_client(state: RunState, client_id: str, reason: str) -> ClientState:
    profile = state.profiles.get(client_id)
    device = profile.device if profile is not None else ""
    return ClientState(client_id=client_id, device=device, stage="missing", reason=reason)


def _assign(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Who was not chosen is left out; the others are given sizes while the phase goes on."""
    state, drawn = selected(context, state)
    left_out = {
        name: replace(client, stage="skipped", reason=NOT_DRAWN)
        for name, client in state.clients.items()
        if client.stage == "answered" and name not in drawn
    }
    state = state.entered(Training(), now_s)
    return replace(state, clients=MappingProxyType(dict(sorted({**state.clients, **left_out}.items())))), ()


def _train(context: RunContext, state: RunState, now_s: float) -> Outcome:
    state, unscored = (state, ()) if lacking(context, state) else without_late_scores(context, state, now_s)
    state, given = sized(context, state)
    state, parted = without_parted(context, state, now_s)
    first = (*unscored, *given, *parted)
    collection = collected(context, state, "training", now_s)
    if not collection.closes or (not collection.late and waits_for_programs(context, state)):
        return state, first
    state, actions = with_phase_closed(context, state, "training", collection, now_s)
    if not any(client.stage == "done" for client in state.clients.values()):
        # Where the next try begins at once, nobody would be told after this step.
        notices = [notice for client in state.clients.values() for notice in skip_notice(client)]
        return fruitless(context, state, now_s), (*first, *actions, *notices)
    state, last = begin_aggregation(context, state, now_s)
    return state, (*first, *actions, *last)


def _open(state: RunState) -> Iterator[str]:
    return (name for name, client in state.clients.items() if client.open)


def _open_deploy(context: RunContext, state: RunState, now_s: float) -> Outcome:
    if not context.config.deploy_targets or not state.last:
        return state.entered(Finished(), now_s), ()
    return replace(state, clients=MappingProxyType({})).entered(Deploying(), now_s), ()


def _deploy_client(context: RunContext, state: RunState, last: ClientState) -> ClientState:
    """The state of a client that is to have its own models: of the network that stands for that which it trained."""
    client = standing_for(context, state, last)
    return replace(
        last,
        attempt=0,
        stage="preparing" if client else "skipped",
        reason="" if client else "its network has retired, and the method names no other for it",
        given=Submodel(size=client.size, architecture=client.architecture) if client else last.given,
        task=None,
        trained=None,
    )


def _deploy(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Have models made for the next few, and end the phase where nothing more is to be waited for."""
    names = nsmallest(AT_ONCE + 1, state.last.keys() - state.clients.keys())
    if names:
        new = {name: _deploy_client(context, state, state.last[name]) for name in names[:AT_ONCE]}
        wanted = [client.participant for client in new.values() if client.stage == "preparing"]
        actions = tuple(ModelsRequest(participant=one, round=state.round) for one in wanted if one is not None)
        more = (GoOn(),) if len(names) > AT_ONCE else ()
        return replace(state, clients=MappingProxyType({**state.clients, **new})), (*actions, *more)
    state, parted = without_parted(context, state, now_s)
    if next(awaited_models(context, state, now_s), None) is not None:
        return state, parted
    unfetched = "it did not fetch its models in time"
    reasons = {name: with_absence(context, state, name, unfetched, now_s) for name in _open(state)}
    state, closed = closed_clients(state, reasons)
    return state.entered(Finished(), now_s), (*parted, *closed)
