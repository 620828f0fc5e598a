"""Moves a run from phase to phase and keeps every deadline; nothing else does. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from heapq import nsmallest
from itertools import islice
from types import MappingProxyType

from subfleet.rounds import awaiting, progress
from subfleet.rounds.buffering import advance_buffer, repeat_requests
from subfleet.rounds.closing import begin_aggregation, fail_attempt, is_over, open_round
from subfleet.rounds.context import RunContext
from subfleet.rounds.evaluating import advance_evaluation
from subfleet.rounds.judging import build_skip_notice, list_idle_notices
from subfleet.rounds.measuring import list_answered, list_away, list_unread, read_survey
from subfleet.rounds.members import SILENT_SINCE, holds_lease, list_expected, list_silent_members
from subfleet.rounds.networks import find_standing, has_awaited_programs, request_networks
from subfleet.rounds.offers import NOT_AVAILABLE
from subfleet.rounds.searching import advance_search, is_search_due
from subfleet.rounds.selection import NOT_DRAWN, select_clients
from subfleet.rounds.signals import Action, GoOn, Outcome
from subfleet.rounds.sizing import drop_late_scores, give_sizes, list_lacking, request_new
from subfleet.rounds.state import ClientState, RunState, Submodel
from subfleet.rounds.tasks import request_tasks

AT_ONCE = 64
"""Clients that models are requested for in one step."""


def advance(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Move on until the phase has to wait."""
    actions: tuple[Action, ...] = ()
    while True:
        before = state.phase
        if before not in _ADVANCES:  # an event ends an aggregation; nothing ends a finished run
            return state, actions
        state, more = _ADVANCES[before](context, state, now_s)
        actions += more
        if state.phase == before:
            return state, actions


def _waiting(context: RunContext, state: RunState, now_s: float) -> Outcome:
    if is_search_due(context, state):
        return state.enter(progress.Searching(), now_s), ()
    if is_over(context, state):
        return _open_deploy(context, state, now_s)
    # A strict run waits for clients that went away, but does not count them to begin a round.
    members, least = state.live.members, context.config.min_clients
    present = (name for name in list_expected(context, state, now_s) if holds_lease(context, members[name], now_s))
    there = sum(1 for _ in islice(present, least))
    if there >= least:
        again, pause_s = state.round > state.aggregated_round, state.live.attempt_times.pause_s
        paused = again and now_s - state.live.entered_s < pause_s
        if paused:
            return state, ()
        state = open_round(context, state, now_s)
        return (state, ()) if context.config.asynchronous is None else (state, repeat_requests(context, state))
    if now_s - state.live.entered_s < context.config.deadlines.join_s:
        return state, ()
    failure = (
        f"only {there} of {least} clients were present after "
        f"{context.config.deadlines.join_s:g} s; start more clients or lower min_clients"
    )
    return state.fail(failure, now_s), ()


def _advance_measuring(context: RunContext, state: RunState, now_s: float) -> Outcome:
    limit_s, waited_s = awaiting.get_limit_s(context, "telemetry"), now_s - state.live.entered_s
    late = waited_s >= limit_s
    answered = list_answered(state)
    if not late and not answered:
        return state, ()
    absent = [*list_expected(context, state, now_s, answered)]
    known = [awaiting.get_punctuality(state, name, "telemetry") for name in absent]
    there = len(answered) + sum(not punctuality.awaited for punctuality in known)
    few = there < context.config.min_clients
    awaited = (punctuality.patience_s(limit_s) for punctuality in known if punctuality.awaited)
    if not late and (few or any(waited_s < patience_s for patience_s in awaited)):
        return state, ()
    if requests := request_networks(context, state):
        if waited_s < context.config.deadlines.measure_s + context.config.deadlines.round_s:
            return request_new(state, requests)
        state, _ = awaiting.close_clients(state, dict.fromkeys(_list_open(state), awaiting.NO_SIZE))
        return fail_attempt(context, state, now_s), ()
    missed = sorted(absent)
    silent = [name for name in list_silent_members(state, answered) if name not in missed]
    reasons = {name: awaiting.explain_missing(context, state, name, "telemetry", now_s, late) for name in missed}
    members = state.live.members
    since = {name: members[name].silent_since or state.round for name in (*missed, *silent)}
    members = members.with_items({name: replace(members[name], silent_since=number) for name, number in since.items()})
    state = replace(state, live=replace(state.live, members=members))
    if not answered:
        return _announce_again(context, state, now_s)
    state = awaiting.record_missing(state, missed, "telemetry")
    reasons |= {name: f"{SILENT_SINCE} {since[name]}" for name in silent}
    missing = [
        ClientState(client_id=name, device=state.profiles[name].device, stage="missing", reason=reason)
        for name, reason in reasons.items()
    ]
    return _assign(context, state.with_clients(*missing), now_s)


def _announce_again(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Announce the round again until the join deadline: some clients may be alive and send no telemetry."""
    if now_s - state.live.opened_s < context.config.deadlines.join_s:
        return state.enter(progress.Waiting(), now_s), ()
    failure = (
        f"no client answered the announcement of round {state.round} within {context.config.deadlines.join_s:g} s; "
        "see the clients' logs, or raise measure_s"
    )
    return state.fail(failure, now_s), ()


def _assign(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Select clients, which are given sizes during the phase; others that could take part are idle.

    A client that is away but brings a network keeps its state, because the network may join the run's.
    """
    state, drawn = select_clients(context, state)
    undrawn, away = dict.fromkeys(list_unread(state) - drawn, ""), dict.fromkeys(list_away(state), "")
    for name, client in state.clients.items():
        if client.stage == "answered" and name not in drawn:
            undrawn[name] = client.offer.telemetry_id
        elif client.stage == "skipped" and client.reason == NOT_AVAILABLE and client.offer.brought is None:
            away[name] = client.offer.telemetry_id
    new = read_survey(context, state, state.live.survey, drawn - state.clients.keys())
    busy = {name: client for name, client in state.clients.items() if name not in undrawn and name not in away}
    idle = {NOT_DRAWN: undrawn, NOT_AVAILABLE: away}
    state = replace(
        state,
        clients=MappingProxyType(dict(sorted({**busy, **new}.items()))),
        idle=MappingProxyType({reason: MappingProxyType(names) for reason, names in idle.items() if names}),
        live=replace(state.live, survey=None),
    )
    return state.enter(progress.Training(), now_s), ()


def _advance_training(context: RunContext, state: RunState, now_s: float) -> Outcome:
    if context.config.asynchronous is not None:
        return advance_buffer(context, state, context.config.asynchronous, now_s)
    state, unscored = (state, ()) if list_lacking(context, state) else drop_late_scores(context, state, now_s)
    state, sizing_actions = give_sizes(context, state)
    state, parted = awaiting.drop_departed(context, state, now_s)
    first = (*unscored, *sizing_actions, *parted)
    collection = awaiting.collect(context, state, "training", now_s)
    if not collection.closes or (not collection.late and has_awaited_programs(context, state)):
        return state, first
    state, actions = awaiting.close_phase(context, state, "training", collection, now_s)
    if not any(client.stage == "done" for client in state.clients.values()):
        # If the next attempt begins at once, later steps do not notify these clients.
        notices = [notice for client in state.clients.values() for notice in build_skip_notice(client)]
        notices += list_idle_notices(state)
        return fail_attempt(context, state, now_s), (*first, *actions, *notices)
    state, last = begin_aggregation(context, state, now_s)
    return state, (*first, *actions, *last)


def _list_open(state: RunState) -> Iterator[str]:
    return (name for name, client in state.clients.items() if client.open)


def _open_deploy(context: RunContext, state: RunState, now_s: float) -> Outcome:
    if not context.config.deploy_targets or not state.last:
        return state.enter(progress.Finished(), now_s), ()
    return state.without_clients().enter(progress.Deploying(), now_s), ()


def _build_deploy_client(context: RunContext, state: RunState, last: ClientState) -> ClientState:
    """The state of a client that its own models are deployed to."""
    client = find_standing(context, state, last)
    return replace(
        last,
        attempt=0,
        stage="preparing" if client else "skipped",
        reason="" if client else "its network has retired, and the method gives no other",
        given=Submodel(size=client.size, architecture=client.architecture) if client else last.given,
        task=None,
        trained=None,
    )


def _advance_deployment(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Request the models of the next few clients, and end the phase when it waits for no client."""
    names = nsmallest(AT_ONCE + 1, state.last.keys() - state.clients.keys())
    if names:
        new = [_build_deploy_client(context, state, state.last[name]) for name in names[:AT_ONCE]]
        more = (GoOn(),) if len(names) > AT_ONCE else ()
        return state.with_clients(*new), (*request_tasks(state, new), *more)
    state, parted = awaiting.drop_departed(context, state, now_s)
    if next(awaiting.list_awaited_models(context, state, now_s), None) is not None:
        return state, parted
    unfetched = "it did not fetch its models in time"
    reasons = {name: awaiting.add_absence(context, state, name, unfetched, now_s) for name in _list_open(state)}
    state, closed = awaiting.close_clients(state, reasons)
    return state.enter(progress.Finished(), now_s), (*parted, *closed)


_ADVANCES: Mapping[progress.PhaseName, Callable[[RunContext, RunState, float], Outcome]] = MappingProxyType(
    {
        "waiting": _waiting,
        "measure": _advance_measuring,
        "train": _advance_training,
        "evaluate": advance_evaluation,
        "search": advance_search,
        "deploy": _advance_deployment,
    }
)
