"""The run as a pure state machine: (context, state, event, now) to (state, actions). No clock, no file, no network.

Handlers apply events; only `advance` moves from phase to phase. A caller stores the new state durably before it
performs the actions, so that every promise to a client survives a crash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import cast

from subfleet.protocol.answers import Answer, Deployed, Evaluated, Refusal, Scores, Update
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Presence, Profile, Telemetry
from subfleet.rounds import signals
from subfleet.rounds.arrivals import apply_result
from subfleet.rounds.assigning import answer_refusal, assign_client, describe_refusal, lower_budget, remember_disk
from subfleet.rounds.awaiting import record_answer
from subfleet.rounds.buffering import is_postponed, postpone, repeat_requests, resend_tasks
from subfleet.rounds.closing import request_aggregation
from subfleet.rounds.context import RunContext
from subfleet.rounds.judging import build_idle_notice, build_skip_notice, judge, list_skip_notices, reply
from subfleet.rounds.live import Duty, FleetMember, Sweep
from subfleet.rounds.measuring import receive_survey, receive_telemetry
from subfleet.rounds.members import forget_strangers, holds_lease, mark_heard, record_departure, with_members
from subfleet.rounds.obstacles import forget_refusals, record_unfit
from subfleet.rounds.offers import reply_to_declaration
from subfleet.rounds.phases import advance
from subfleet.rounds.sizing import assign_best, list_lacking
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.work import CheckRequest, ProgramRequest


def step(context: RunContext, state: RunState, event: signals.Event, now_s: float) -> signals.Outcome:
    """Apply an event, then move on as far as the state allows."""
    state, actions = _step(context, state, event, now_s)
    while state.live.postponed and not is_postponed(context, state, state.live.postponed[0]):
        first, *rest = state.live.postponed
        state, more = _step(context, replace(state, live=replace(state.live, postponed=tuple(rest))), first, now_s)
        actions += more
    return state, actions


def _step(context: RunContext, state: RunState, event: signals.Event, now_s: float) -> signals.Outcome:
    handled, actions, moves = state, list[signals.Action](), False
    for events in _group(event):
        before = handled
        if is_postponed(context, before, events[0]):
            handled = postpone(before, events[0])
            continue
        handled, more = _handle(context, before, events, now_s)
        actions += more
        moves = moves or not all(_moves_nothing(context, before, handled, one, now_s) for one in events)
    if not moves:
        return handled, tuple(actions)
    after, further = advance(context, handled, now_s)
    return after, (*actions, *further, *list_skip_notices(state, after))


def list_resume_actions(context: RunContext, state: RunState) -> tuple[signals.Action, ...]:
    """The actions that a server repeats when it continues a stored run: everything that was in progress."""
    ahead = tuple(ProgramRequest(program=program, round=state.round) for program in state.queue)
    if state.phase == "aggregate":
        return (request_aggregation(context, state), *ahead, *resend_tasks(state))
    if state.phase not in ("measure", "train", "evaluate", "deploy"):  # the next step requests a search's generation
        return (*ahead, *resend_tasks(state))
    lacking = list_lacking(context, state) if state.phase in ("measure", "train") else ()
    # Tasks are requested once sizes can be chosen, in case one is too large.
    return (*ahead, *resend_tasks(state), *(lacking or repeat_requests(context, state)))


def _group(event: signals.Event) -> Iterator[Sequence[signals.SingleEvent]]:
    """The events of an event in order: telemetry that arrives together, and every other event by itself."""
    for kind, group in groupby(event.messages if isinstance(event, signals.Messages) else (event,), type):
        events = tuple(group)
        yield from (events,) if kind is Telemetry else ((one,) for one in events)


def _handle(
    context: RunContext, state: RunState, events: Sequence[signals.SingleEvent], now_s: float
) -> signals.Outcome:
    event = events[0]
    match event:
        case signals.Tick():
            outcome: signals.Outcome = forget_strangers(context, state, now_s), ()
        case signals.RequestDone() | signals.RequestFailed():
            outcome = apply_result(context, state, event, now_s)
        case Presence():
            outcome = _receive_presence(context, state, event, now_s)
        case Profile():
            outcome = _receive_profile(context, state, event, now_s)
        case Telemetry():
            outcome = receive_telemetry(context, state, cast("Sequence[Telemetry]", events), now_s)
        case signals.Joined():
            outcome = _receive_joined(state, event, now_s), ()
        case signals.Surveyed():
            outcome = receive_survey(context, state, event.survey)
        case Update() | Scores() | Refusal() | Evaluated() | Deployed():
            outcome = _receive_answer(context, state, event, now_s)
        case _:
            never(event)
    return outcome


def _moves_nothing(
    context: RunContext, before: RunState, after: RunState, event: signals.SingleEvent, now_s: float
) -> bool:
    """Whether a message only confirms that a client is present. The next tick does what is due.

    So a heartbeat costs the same in a fleet of any size.
    """
    if not isinstance(event, Presence | Profile | Telemetry):
        return False
    if after is before:
        return True
    if isinstance(event, Profile) or after.clients is not before.clients:
        return False
    known, now = before.live.members.get(event.client_id), after.live.members.get(event.client_id)
    if known is None or now is None or not holds_lease(context, known, now_s):
        return False
    return replace(now, heard_s=known.heard_s, noted_s=known.noted_s) == known


def _receive_presence(context: RunContext, state: RunState, presence: Presence, now_s: float) -> signals.Outcome:
    member = state.live.members.get(presence.client_id, FleetMember())
    if not presence.online:
        # A will is only a hint, and one of an earlier session does not count.
        if presence.client_id not in state.live.members or presence.session_id not in ("", member.session_id):
            return state, ()
        member = record_departure(member, presence, now_s)
        return with_members(state, {presence.client_id: member}), ()
    started_anew = presence.session_id != member.session_id
    member = mark_heard(member, presence.session_id, now_s)
    state = with_members(state, {presence.client_id: member})
    client = state.clients.get(presence.client_id)
    if started_anew and client is not None and client.stage in ("scoring", "out") and client.task is not None:
        # The ack of this task may have come from the earlier session, which has lost the task.
        return state, (signals.SendTask(task=client.task),)
    return state, (*build_skip_notice(client), *build_idle_notice(state, presence.client_id))


def _receive_profile(context: RunContext, state: RunState, profile: Profile, now_s: float) -> signals.Outcome:
    member = state.live.members.get(profile.client_id, FleetMember())
    # It comes with every heartbeat, and is answered each time, as answers may be lost.
    answer = reply_to_declaration(context, profile, state.brought.get(profile.client_id, ()))
    if state.profiles.get(profile.client_id) == profile:
        return state, answer
    state = with_members(forget_refusals(state, profile.client_id), {profile.client_id: replace(member, noted_s=now_s)})
    swept = replace(state.live, swept=Sweep())  # now there may be too many members
    return replace(state, profiles=state.profiles.with_items({profile.client_id: profile}), live=swept), answer


def _receive_joined(state: RunState, joined: signals.Joined, now_s: float) -> RunState:
    """Clients that have appeared together, and hear what their profiles lead to by other means."""
    members = state.live.members
    heard = {
        profile.client_id: mark_heard(members.get(profile.client_id, FleetMember()), profile.session_id, now_s)
        for profile in joined.profiles
    }
    profiles = {profile.client_id: profile for profile in joined.profiles}
    for name in profiles.keys() & state.profiles.keys():
        state = forget_refusals(state, name)
    return replace(with_members(state, heard), profiles=state.profiles.with_items(profiles))


def _receive_answer(context: RunContext, state: RunState, answer: Answer, now_s: float) -> signals.Outcome:
    """Apply an answer that counts; a client repeats each until it is acknowledged."""
    verdict, reason = judge(context, state, answer)
    ack = reply(answer.client_id, answer.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (ack,)
    if isinstance(answer, Update):
        return state, (CheckRequest(update=answer),)  # an ack follows the check
    if state.phase == "train" and list_lacking(context, state):
        return state, ()  # no size can be chosen yet; without an ack the client repeats its answer
    client, actions = state.clients[answer.client_id], tuple[signals.Action, ...]()
    match answer:
        case Scores():
            state = record_answer(context, state, client, "scores", now_s)
            client, actions = assign_best(context, state, client, answer)
        case Refusal():
            state, client, actions = _receive_refusal(context, state, client, answer)
        case Evaluated():
            duty: Duty = "paths" if state.phase == "search" else "evaluation"
            state = record_answer(context, state, client, duty, now_s)
            client = replace(client, stage="done", evaluated=answer)
        case Deployed():
            client = replace(client, stage="done")
        case _:
            never(answer)
    return state.with_clients(client), (ack, signals.Withdraw(task_id=answer.task_id), *actions)


def _receive_refusal(
    context: RunContext, state: RunState, client: ClientState, refusal: Refusal
) -> tuple[RunState, ClientState, tuple[signals.Action, ...]]:
    why = describe_refusal(refusal)
    client = replace(client, refusals=(*client.refusals, why))
    state = remember_disk(state, refusal)
    if state.phase == "train":  # of the programs that train and score
        state = record_unfit(state, client, refusal, why)
    if client.stage == "scoring":
        return state, *assign_client(context, state, replace(lower_budget(client, refusal), task=None))
    return state, *answer_refusal(context, state, client, refusal)
