"""The run as a pure state machine: (terms, state, event, now) to (state, actions). No clock, no file, no network.

Handlers take in what happened; `advance` alone moves from phase to phase. A caller stores the new state durably before
it performs the actions, so that whatever was promised to a client survives a crash.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import (
    Deployed,
    Evaluated,
    Presence,
    Profile,
    Refusal,
    RoundInfo,
    Scores,
    Telemetry,
    Update,
)
from subfleet.rounds.actions import Action, SendTask, Withdraw
from subfleet.rounds.answers import judge, reply, skip_notice, skip_notices
from subfleet.rounds.arrivals import tasks_wanted, with_failure, with_result
from subfleet.rounds.awaiting import sent_s, with_answer
from subfleet.rounds.closing import fold_action, with_exclusion
from subfleet.rounds.evaluating import evaluated, evaluations_wanted
from subfleet.rounds.events import Done, Event, Failed, FromDevice, FromServer, Tick
from subfleet.rounds.live import Member, Swept
from subfleet.rounds.members import holds_lease, parted, without_strangers
from subfleet.rounds.offers import declaration_reply, measured_seat, with_brought
from subfleet.rounds.phases import advance
from subfleet.rounds.pricing import prices_wanted
from subfleet.rounds.proposing import scored_seat, scoring_wanted, unscored_seat
from subfleet.rounds.refusals import forgiven, with_unfit
from subfleet.rounds.seating import reason_of, refused_seat, with_less, with_room
from subfleet.rounds.sizing import asking, lacking
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CheckRequest, ModelsRequest, ProgramRequest

__all__ = ["resume_actions", "round_info", "step"]

Outcome = tuple[RunState, tuple[Action, ...]]


def step(terms: Terms, state: RunState, event: Event, now_s: float) -> Outcome:
    """Take in an event, then move on as far as the state allows."""
    handled, actions = _handled(terms, state, event, now_s)
    if isinstance(event, Presence | Profile | Telemetry) and _moves_nothing(terms, state, handled, event, now_s):
        return handled, actions
    after, more = advance(terms, handled, now_s)
    return after, (*actions, *more, *skip_notices(state, after))


def round_info(terms: Terms, state: RunState, now_s: float) -> RoundInfo | None:
    """What everyone is told of the run now; None where there is nothing to tell, between rounds.

    Its message id follows from what it says, so that repetitions are recognised.
    """
    phases: Mapping[str, tuple[Any, float]] = {
        "measure": ("measure", terms.config.deadlines.measure_s),
        "train": ("train", terms.config.deadlines.round_s),
        "evaluate": ("train", terms.config.deadlines.evaluate_s),
        "search": ("train", terms.config.deadlines.evaluate_s),
        "deploy": ("train", terms.config.deadlines.deploy_s),
        "finished": ("finished", terms.config.deadlines.linger_s),
        "failed": ("finished", terms.config.deadlines.linger_s),
    }
    if state.phase not in phases:
        return None
    phase, limit_s = phases[state.phase]
    again = f".{state.retry}" if state.retry else ""
    return RoundInfo(
        run_id=terms.run_id,
        round=state.round,
        round_count=terms.config.total_rounds,
        phase=phase,
        log_time_s=terms.config.log_time_s(max(state.turn, 1)),
        deadline_s=max(0.0, limit_s - (now_s - state.live.entered_s)),
        message_id=f"{terms.run_id}/{state.round}{again}/{phase}",
        retry=state.retry,
        log_quantile=terms.log_quantile if phase == "measure" else None,
        sample_bytes=terms.sample_bytes,
    )


def resume_actions(terms: Terms, state: RunState) -> tuple[Action, ...]:
    """What is to be done again when a stored state is taken up: everything that was under way."""
    ahead = (ProgramRequest(program=one, round=state.round) for one in state.queue)
    actions: list[Action] = [*ahead]
    if state.phase == "fold":
        return (fold_action(terms, state), *actions)
    if state.phase == "deploy":
        return (*actions, *_deploying(state))
    if state.phase == "evaluate":
        return (*actions, *_sent(state), *evaluations_wanted(state, state.seats))
    if state.phase not in ("measure", "train"):  # in a search the next step asks for its generation
        return tuple(actions)
    for seat in state.seats.values():
        if seat.stage in ("scoring", "out") and seat.task is not None:
            actions.append(SendTask(task=seat.task))
        elif seat.stage == "scoring":
            actions.append(scoring_wanted(state, seat))
    # Tasks that are not out yet are asked for when a smaller size could be chosen, should one be too large.
    return (*actions, *(lacking(terms, state) or tasks_wanted(state)))


def _sent(state: RunState) -> Iterator[SendTask]:
    return (SendTask(task=seat.task) for seat in state.seats.values() if seat.stage == "out" and seat.task is not None)


def _deploying(state: RunState) -> tuple[Action, ...]:
    waiting = (seat.participant for seat in state.seats.values() if seat.stage == "preparing")
    requests = (ModelsRequest(participant=one, round=state.round) for one in waiting if one is not None)
    return (*_sent(state), *requests)


def _handled(terms: Terms, state: RunState, event: Event, now_s: float) -> Outcome:
    return _told(terms, state, event, now_s) if isinstance(event, FromDevice) else _done(terms, state, event, now_s)


def _moves_nothing(
    terms: Terms, before: RunState, after: RunState, event: Presence | Profile | Telemetry, now_s: float
) -> bool:
    """Whether a client that is there has said no more than that: what else is due is seen in the next tick.

    So a heartbeat costs the same in a fleet of any size.
    """
    if after is before:
        return True
    if isinstance(event, Profile) or after.seats is not before.seats:
        return False
    known, now = before.live.members.get(event.client_id), after.live.members.get(event.client_id)
    if known is None or now is None or not holds_lease(terms, known, now_s):
        return False
    return replace(now, heard_s=known.heard_s, noted_s=known.noted_s) == known


def _told(terms: Terms, state: RunState, event: FromDevice, now_s: float) -> Outcome:
    match event:
        case Presence():
            outcome = _heard(terms, state, event, now_s)
        case Profile():
            outcome = _profiled(terms, state, event, now_s)
        case Telemetry():
            outcome = _measured(terms, state, event, now_s)
        case Update():
            outcome = _update_offered(terms, state, event)
        case Scores() | Refusal() | Evaluated() | Deployed():
            outcome = _answered(terms, state, event, now_s)
        case _:
            never(event)
    return outcome


def _done(terms: Terms, state: RunState, event: FromServer, now_s: float) -> Outcome:
    match event:
        case Tick():
            outcome: Outcome = without_strangers(terms, state, now_s), ()
        case Done():
            outcome = with_result(terms, state, event, now_s)
        case Failed():
            outcome = with_failure(terms, state, event, now_s)
        case _:
            never(event)
    return outcome


def _heard(terms: Terms, state: RunState, presence: Presence, now_s: float) -> Outcome:
    member = state.live.members.get(presence.client_id, Member())
    if not presence.online:
        # A will is only a hint, and one of an earlier session says nothing of this one.
        if presence.client_id not in state.live.members or presence.session_id not in ("", member.session_id):
            return state, ()
        member = parted(member, presence, now_s)
        return _with_member(state, presence.client_id, member), ()
    started_anew = presence.session_id != member.session_id
    member = _spoke(member, presence.session_id, now_s)
    state = _with_member(state, presence.client_id, member)
    seat = state.seats.get(presence.client_id)
    if started_anew and seat is not None and seat.stage in ("scoring", "out") and seat.task is not None:
        # The receipt of this task may have come from the life before, which took the task with it.
        return state, (SendTask(task=seat.task),)
    return state, skip_notice(seat)


def _spoke(member: Member, session_id: str, now_s: float) -> Member:
    return replace(member, session_id=session_id, heard_s=now_s, gone="", farewell="", silent_since=0, noted_s=now_s)


def _profiled(terms: Terms, state: RunState, profile: Profile, now_s: float) -> Outcome:
    member = state.live.members.get(profile.client_id, Member())
    # It comes with every heartbeat, and so does the answer to what it declares, which may have been lost.
    answer = declaration_reply(terms, profile, state.brought.get(profile.client_id, ()))
    if state.profiles.get(profile.client_id) == profile:
        return state, answer
    state = _with_member(forgiven(state, profile.client_id), profile.client_id, replace(member, noted_s=now_s))
    swept = replace(state.live, swept=Swept())  # there may be too many members now
    return replace(state, profiles=state.profiles.updated({profile.client_id: profile}), live=swept), answer


def _with_member(state: RunState, client_id: str, member: Member) -> RunState:
    live = state.live
    swept = live.swept if client_id in live.members else Swept()  # there may be too many of them now
    return replace(state, live=replace(live, members=live.members.updated({client_id: member}), swept=swept))


def _measured(terms: Terms, state: RunState, telemetry: Telemetry, now_s: float) -> Outcome:
    client_id, message_id = telemetry.client_id, telemetry.message_id
    member = _spoke(state.live.members.get(client_id, Member()), telemetry.session_id, now_s)
    state = _with_member(state, client_id, member)
    if telemetry.round is None:
        return state, ()
    if (telemetry.run_id, telemetry.round, telemetry.retry) != (terms.run_id, state.round, state.retry):
        return state, (reply(client_id, message_id, "refused", f"round {telemetry.round} of that run is not open"),)
    if client_id in state.seats and state.seats[client_id].stage != "missing":
        return state, (reply(client_id, message_id, "duplicate"),)
    if state.phase != "measure":
        return state, (reply(client_id, message_id, "refused", f"round {state.round} has begun without this client"),)
    if (profile := state.profiles.get(client_id)) is None:
        # Its profile is still on its way; the client sends the telemetry again until it has a receipt.
        return state, ()
    state = with_answer(state, client_id, "telemetry", now_s - state.live.entered_s)
    seat = with_exclusion(state, measured_seat(terms, state, profile, telemetry))
    state, requests = with_brought(state.with_seats(seat), seat), tuple[Action, ...]()
    if seat.stage == "answered":
        state, requests = asking(state, prices_wanted(terms, state, seat.offer.runtime))
    return state, (reply(client_id, message_id, "accepted"), *requests)


def _answered(terms: Terms, state: RunState, answer: Scores | Refusal | Evaluated | Deployed, now_s: float) -> Outcome:
    """Take in an answer that counts; each is repeated until its receipt arrives."""
    verdict, reason = judge(terms, state, answer)
    receipt = reply(answer.client_id, answer.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (receipt,)
    if state.phase == "train" and lacking(terms, state):
        return state, ()  # no size can be chosen yet; without a receipt the client sends it again
    seat, actions = state.seats[answer.client_id], tuple[Action, ...]()
    match answer:
        case Scores():
            state = with_answer(state, answer.client_id, "scores", now_s - sent_s(terms, state, seat, "scores"))
            seat, actions = scored_seat(terms, state, seat, answer)
        case Refusal():
            state, seat, actions = _refused(terms, state, seat, answer)
        case Evaluated():
            state, seat = evaluated(terms, state, seat, answer, now_s)
        case Deployed():
            seat = replace(seat, stage="done")
        case _:
            never(answer)
    return state.with_seats(seat), (receipt, Withdraw(task_id=answer.task_id), *actions)


def _refused(terms: Terms, state: RunState, seat: Seat, refusal: Refusal) -> tuple[RunState, Seat, tuple[Action, ...]]:
    why = reason_of(refusal)
    seat = replace(seat, refusals=(*seat.refusals, why))
    state = with_room(state, refusal)
    if state.phase == "train":  # of the programs that train and score
        state = with_unfit(state, seat, refusal, why)
    if seat.stage == "scoring":
        return state, *unscored_seat(terms, state, with_less(seat, refusal))
    return state, *refused_seat(terms, state, seat, refusal)


def _update_offered(terms: Terms, state: RunState, update: Update) -> Outcome:
    verdict, reason = judge(terms, state, update)
    if verdict == "accepted":
        return state, (CheckRequest(update=update),)
    return state, (reply(update.client_id, update.message_id, verdict, reason),)
