"""The run as a pure state machine: (plan, state, event, now) to (state, actions). No clock, no file, no network.

Handlers take in what happened; `advance` alone moves from phase to phase. A caller stores the new state durably before
it performs the actions, so that whatever was promised to a client survives a crash.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from subfleet.protocol.memory import Packing
from subfleet.protocol.messages import RoundInfo
from subfleet.rounds.actions import Action, Export, Fetch, PrepareModels, SendTask, Withdraw
from subfleet.rounds.answers import judge, reply
from subfleet.rounds.closing import fold_action, folded, with_exclusion
from subfleet.rounds.declarations import declaration_reply
from subfleet.rounds.events import (
    DeployPrepared,
    Event,
    Exported,
    Folded,
    Heard,
    Measured,
    Prepared,
    PrepareFailed,
    Profiled,
    Refused,
    Reported,
    Scored,
    ScoringPrepared,
    Tick,
    UpdateOffered,
    UpdateRejected,
    UpdateStored,
)
from subfleet.rounds.members import without_strangers
from subfleet.rounds.notices import skip_notice, skip_notices
from subfleet.rounds.phases import advance
from subfleet.rounds.proposing import prepare_scoring_action, scored_seat, scoring_seat, unscored_seat
from subfleet.rounds.seating import (
    measured_seat,
    prepare_action,
    prepared_seat,
    reason_of,
    refused_seat,
    task_for_models,
    with_less_memory,
)
from subfleet.rounds.state import NO_PROGRAM_BYTES, KnownPlan, Member, Plan, RunState, Seat
from subfleet.rounds.unfit import forgiven, with_unfit
from subfleet.search.queue import plan_key

__all__ = ["resume_actions", "round_info", "step"]

Outcome = tuple[RunState, tuple[Action, ...]]


def step(plan: Plan, state: RunState, event: Event, now_s: float) -> Outcome:
    """Take in an event, then move on as far as the state allows."""
    handled, actions = _HANDLERS[type(event)](plan, state, event, now_s)
    after, more = advance(plan, handled, now_s)
    return after, (*actions, *more, *skip_notices(state, after))


def round_info(plan: Plan, state: RunState, now_s: float) -> RoundInfo | None:
    """What everyone is told of the run now; None where there is nothing to tell, between rounds.

    Its message id follows from what it says, so that repetitions are recognised.
    """
    phases: Mapping[str, tuple[Any, float]] = {
        "measure": ("measure", plan.config.deadlines.measure_s),
        "train": ("train", plan.config.deadlines.round_s),
        "deploy": ("train", plan.config.deadlines.deploy_s),
        "finished": ("finished", plan.config.deadlines.linger_s),
        "failed": ("finished", plan.config.deadlines.linger_s),
    }
    if state.phase not in phases:
        return None
    phase, limit_s = phases[state.phase]
    again = f".{state.retry}" if state.retry else ""
    return RoundInfo(
        run_id=plan.run_id,
        round=state.round,
        round_count=plan.config.total_rounds,
        phase=phase,
        log_time_s=plan.config.log_time_s(max(state.turn, 1)),
        deadline_s=max(0.0, limit_s - (now_s - state.entered_s)),
        message_id=f"{plan.run_id}/{state.round}{again}/{phase}",
        retry=state.retry,
        log_quantile=plan.log_quantile if phase == "measure" else None,
    )


def resume_actions(plan: Plan, state: RunState) -> tuple[Action, ...]:
    """What is to be done again when a stored state is taken up: everything that was under way."""
    actions: list[Action] = [Export(queued=one, round=state.round) for one in state.queue]
    if state.phase == "fold":
        return (fold_action(state), *actions)
    for seat in state.seats.values():
        if seat.stage in ("scoring", "out") and seat.task is not None:
            actions.append(SendTask(task=seat.task))
        elif seat.stage == "scoring":
            actions.append(prepare_scoring_action(state, seat))
        if seat.stage != "preparing" or seat.participant is None:
            continue
        prepare = prepare_action(state, seat)
        if state.phase == "deploy":
            actions.append(PrepareModels(participant=seat.participant, round=state.round))
        elif prepare is not None:
            actions.append(prepare)
    return tuple(actions)


def _tick(plan: Plan, state: RunState, event: Tick, now_s: float) -> Outcome:
    return without_strangers(plan, state, now_s), ()


def _heard(plan: Plan, state: RunState, event: Heard, now_s: float) -> Outcome:
    presence = event.presence
    member = state.members.get(presence.client_id, Member())
    if not presence.online:
        # A will is only a hint, and one of an earlier session says nothing of this one.
        if presence.client_id not in state.members or presence.session_id not in ("", member.session_id):
            return state, ()
        return _with_member(state, presence.client_id, replace(member, heard_s=None, left=True, noted_s=now_s)), ()
    started_anew = presence.session_id != member.session_id
    member = _spoke(member, presence.session_id, now_s)
    state = _with_member(state, presence.client_id, member)
    seat = state.seats.get(presence.client_id)
    if started_anew and seat is not None and seat.stage in ("scoring", "out") and seat.task is not None:
        # The receipt of this task may have come from the life before, which took the task with it.
        return state, (SendTask(task=seat.task),)
    return state, skip_notice(seat)


def _spoke(member: Member, session_id: str, now_s: float) -> Member:
    return replace(member, session_id=session_id, heard_s=now_s, left=False, silent_since=0, noted_s=now_s)


def _profiled(plan: Plan, state: RunState, event: Profiled, now_s: float) -> Outcome:
    member = state.members.get(event.profile.client_id, Member())
    # It comes with every heartbeat, and so does the answer to what it declares, which may have been lost.
    answer = declaration_reply(plan, event.profile)
    if member.profile == event.profile:
        return state, answer
    state = forgiven(state, event.profile.client_id)
    return _with_member(state, event.profile.client_id, replace(member, profile=event.profile, noted_s=now_s)), answer


def _with_member(state: RunState, client_id: str, member: Member) -> RunState:
    return replace(state, members=MappingProxyType({**state.members, client_id: member}))


def _with_seat(state: RunState, seat: Seat) -> RunState:
    return replace(state, seats=MappingProxyType({**state.seats, seat.client_id: seat}))


def _measured(plan: Plan, state: RunState, event: Measured, now_s: float) -> Outcome:
    telemetry = event.telemetry
    client_id, message_id = telemetry.client_id, telemetry.message_id
    member = _spoke(state.members.get(client_id, Member()), telemetry.session_id, now_s)
    state = _with_member(state, client_id, member)
    if telemetry.round is None:
        return state, ()
    if (telemetry.run_id, telemetry.round, telemetry.retry) != (plan.run_id, state.round, state.retry):
        return state, (reply(client_id, message_id, "refused", f"round {telemetry.round} of that run is not open"),)
    if client_id in state.seats and state.seats[client_id].stage != "missing":
        return state, (reply(client_id, message_id, "duplicate"),)
    if state.phase != "measure":
        return state, (reply(client_id, message_id, "refused", f"round {state.round} has begun without this client"),)
    if member.profile is None:
        # Its profile is still on its way; the client sends the telemetry again until it has a receipt.
        return state, ()
    seat = with_exclusion(state, measured_seat(plan, member.profile, telemetry))
    return _with_seat(state, seat), (reply(client_id, message_id, "accepted"),)


def _prepared(plan: Plan, state: RunState, event: Prepared, now_s: float) -> Outcome:
    seat = state.seats.get(event.client_id)
    if state.phase != "train" or seat is None or event.round != state.round or seat.stage != "preparing":
        return state, ()
    if seat.size is None or (seat.attempt, seat.size.spec_id) != (event.attempt, event.size_id):
        return state, ()
    state = _with_known(state, seat, event.planned_peak_bytes, event.operators, event.packings)
    seat, actions = prepared_seat(plan, state, seat, event, now_s)
    return _with_seat(state, seat), actions


def _with_known(
    state: RunState,
    seat: Seat,
    planned_peak_bytes: int,
    operators: tuple[str, ...] = (),
    packings: tuple[Packing, ...] = (),
) -> RunState:
    """The state with what was learned of the program of a seat; in the deploy phase it is no training program."""
    if seat.size is None or state.phase != "train":
        return state
    if plan_key(seat.runtime, seat.size, seat.student) in state.plans:
        return state
    known = KnownPlan(
        size=seat.size,
        target=seat.runtime,
        planned_peak_bytes=planned_peak_bytes,
        turn=state.turn,
        operators=operators,
        packings=packings,
        student=seat.student,
    )
    return replace(state, plans=MappingProxyType({**state.plans, known.key: known}))


def _scoring_prepared(plan: Plan, state: RunState, event: ScoringPrepared, now_s: float) -> Outcome:
    seat = state.seats.get(event.client_id)
    if state.phase != "train" or seat is None or event.round != state.round:
        return state, ()
    if seat.stage != "scoring" or seat.task is not None:
        return state, ()
    seat, actions = scoring_seat(plan, state, seat, event, now_s)
    return _with_seat(state, seat), actions


def _scored(plan: Plan, state: RunState, event: Scored, now_s: float) -> Outcome:
    scores = event.scores
    verdict, reason = judge(plan, state, scores)
    answer = reply(scores.client_id, scores.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    seat, actions = scored_seat(plan, state, state.seats[scores.client_id], scores)
    return _with_seat(state, seat), (answer, Withdraw(task_id=scores.task_id), *actions)


def _exported(plan: Plan, state: RunState, event: Exported, now_s: float) -> Outcome:
    queued = event.queued
    if queued not in state.queue:
        return state, ()
    known = KnownPlan(
        size=queued.size,
        target=queued.target,
        planned_peak_bytes=event.planned_peak_bytes,
        turn=state.turn,
        operators=event.operators,
        packings=event.packings,
    )
    return replace(
        state,
        queue=tuple(one for one in state.queue if one != queued),
        plans=MappingProxyType({known.key: known, **state.plans}),
    ), ()


def _prepare_failed(plan: Plan, state: RunState, event: PrepareFailed, now_s: float) -> Outcome:
    seat = state.seats.get(event.client_id)
    if seat is None or event.round != state.round or seat.stage != "preparing" or seat.attempt != event.attempt:
        return state, ()
    state = _with_known(state, seat, NO_PROGRAM_BYTES)
    return _with_seat(state, replace(seat, stage="skipped", reason=event.reason)), ()


def _deploy_prepared(plan: Plan, state: RunState, event: DeployPrepared, now_s: float) -> Outcome:
    seat = state.seats.get(event.client_id)
    if state.phase != "deploy" or seat is None or seat.stage != "preparing":
        return state, ()
    task = task_for_models(plan, state, seat, event.programs, now_s)
    return _with_seat(state, replace(seat, stage="out", task=task, models=event.models)), (SendTask(task=task),)


def _refused(plan: Plan, state: RunState, event: Refused, now_s: float) -> Outcome:
    refusal = event.refusal
    verdict, reason = judge(plan, state, refusal)
    answer = reply(refusal.client_id, refusal.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    why = reason_of(refusal)
    seat = state.seats[refusal.client_id]
    seat = replace(seat, refusals=(*seat.refusals, why))
    state = with_unfit(state, seat, refusal, why)
    if seat.stage == "scoring":
        seat, actions = unscored_seat(plan, state, with_less_memory(seat, refusal))
    else:
        seat, actions = refused_seat(plan, state, seat, refusal)
    return _with_seat(state, seat), (answer, Withdraw(task_id=refusal.task_id), *actions)


def _update_offered(plan: Plan, state: RunState, event: UpdateOffered, now_s: float) -> Outcome:
    update = event.update
    verdict, reason = judge(plan, state, update)
    if verdict == "accepted":
        return state, (Fetch(update=update),)
    return state, (reply(update.client_id, update.message_id, verdict, reason),)


def _update_stored(plan: Plan, state: RunState, event: UpdateStored, now_s: float) -> Outcome:
    update = event.update
    verdict, reason = judge(plan, state, update)
    answer = reply(update.client_id, update.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    seat = replace(state.seats[update.client_id], stage="done", result=update, change=event.change)
    return _with_seat(state, seat), (answer, Withdraw(task_id=update.task_id))


def _update_rejected(plan: Plan, state: RunState, event: UpdateRejected, now_s: float) -> Outcome:
    update = event.update
    verdict, reason = judge(plan, state, update)
    if verdict != "accepted":
        return state, (reply(update.client_id, update.message_id, verdict, reason),)
    seat = replace(state.seats[update.client_id], stage="refused", reason=event.reason)
    answer = reply(update.client_id, update.message_id, "refused", event.reason)
    return _with_seat(state, seat), (answer, Withdraw(task_id=update.task_id))


def _reported(plan: Plan, state: RunState, event: Reported, now_s: float) -> Outcome:
    deployed = event.deployed
    verdict, reason = judge(plan, state, deployed)
    answer = reply(deployed.client_id, deployed.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    seat = replace(state.seats[deployed.client_id], stage="done")
    return _with_seat(state, seat), (answer, Withdraw(task_id=deployed.task_id))


_HANDLERS: Mapping[type, Callable[[Plan, RunState, Any, float], Outcome]] = MappingProxyType(
    {
        Tick: _tick,
        Heard: _heard,
        Profiled: _profiled,
        Measured: _measured,
        Prepared: _prepared,
        PrepareFailed: _prepare_failed,
        ScoringPrepared: _scoring_prepared,
        Scored: _scored,
        Exported: _exported,
        DeployPrepared: _deploy_prepared,
        Refused: _refused,
        UpdateOffered: _update_offered,
        UpdateStored: _update_stored,
        UpdateRejected: _update_rejected,
        Folded: folded,
        Reported: _reported,
    }
)
