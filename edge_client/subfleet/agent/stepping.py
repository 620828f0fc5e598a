"""The agent: a device's reaction to every event, as one pure function.

`step` takes a state, an event and the time, and returns the new state and the actions. It reads no clock, draws no
random number and touches no file, so that tests can try every sequence of events. Invariants:

- one task at a time: no work starts before the worker has finished the previous one;
- a task that was answered or replaced is never trained again, however often it comes;
- a newer task replaces an older one, and a new round ends the task of an older round;
- an answer is written to disk before it is sent, and kept until its ack or the end of its run;
- work is recorded on disk before it starts, and is not started a third time after two processes died at it;
- every wait has a deadline.
"""

from collections.abc import Callable
from dataclasses import replace

from subfleet.agent.actions import (
    Action,
    Keep,
    Leave,
    MeasureForRound,
    MeasureForTask,
    MeasureRegularly,
    Prune,
    Publish,
    Save,
    Settle,
)
from subfleet.agent.announcements import is_before, is_over, is_past, is_stale
from subfleet.agent.composing import compose_ack, compose_presence, compose_telemetry
from subfleet.agent.events import (
    BlobArrived,
    BlobFailed,
    Event,
    LinkDown,
    LinkUp,
    Measured,
    Received,
    Stopping,
    TimePassed,
    Weighed,
)
from subfleet.agent.outcomes import EvaluationEnded, ModelsPlaced, ScoringEnded, TrainingEnded, WorkFailed
from subfleet.agent.states import AgentSettings, AgentState, CurrentTask, Pending, Saved
from subfleet.agent.survival import Survival
from subfleet.agent.working import (
    Step,
    advance,
    drop_task,
    on_blob,
    on_ended,
    on_task_measured,
    on_weighed,
    refuse,
    refuse_fatal,
)
from subfleet.protocol.answers import Answer
from subfleet.protocol.evaluating import NO_HELD_OUT
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Ack, RoundInfo, Task, Telemetry
from subfleet.protocol.task import Deploy, Evaluate


def start(settings: AgentSettings, saved: Saved, now_s: float) -> Step:
    """Start from the saved state: send its answers again and repeat its unanswered task.

    A task at which processes died, as they do for lack of memory, is refused instead.
    """
    current = None
    if saved.task is not None:
        current = CurrentTask(task=saved.task, stage="waiting", lacking=frozenset(), arrived_at_s=now_s)
    state = AgentState(
        round=saved.round,
        current=current,
        pending=tuple(Pending(message=answer, until_s=now_s + settings.keep_s) for answer in saved.answers),
        done=saved.done,
        programs=saved.programs,
        frozen=saved.frozen,
        survival=saved.survival.restart(saved.round),
        busy_at_s=now_s,
    )
    actions: tuple[Action, ...] = tuple(Keep(message=entry.message) for entry in state.pending)
    if saved.task is not None and saved.task.task_id in {begun.task_id for begun in saved.survival.list_fatal()}:
        state, more = refuse_fatal(settings, state, now_s)
        actions += more
    return state, (Save(saved=state.saved), *actions) if state.saved != saved else actions


def step(settings: AgentSettings, state: AgentState, event: Event, now_s: float) -> Step:
    """Handle an event. The state is saved before anything is sent."""
    after, actions = _handle(settings, state, event, now_s)
    after, more = advance(after)
    actions += more
    if state.durable == after.durable:
        return after, actions
    before_saved, saved = state.saved, after.saved
    if before_saved != saved:
        # An ack or the end of a task frees blobs; they are removed only after the saved state no longer names them.
        freed: tuple[Action, ...] = (Prune(keep=saved.blobs),) if before_saved.blobs - saved.blobs else ()
        actions = (Save(saved=saved), *actions, *freed)
    return after, actions


def _handle(settings: AgentSettings, state: AgentState, event: Event, now_s: float) -> Step:
    match event:
        case LinkUp():
            outcome = _on_link_up(settings, state, now_s)
        case LinkDown():
            outcome = replace(state, connected=False), ()
        case TimePassed():
            outcome = _on_tick(settings, state, now_s)
        case Stopping():
            # A stop on purpose is no death; the next start repeats the task.
            outcome = replace(state, survival=state.survival.stop_work()), ()
        case Received():
            outcome = _on_received(settings, state, event, now_s)
        case Weighed():
            outcome = on_weighed(settings, state, event, now_s)
        case BlobArrived() | BlobFailed():
            outcome = on_blob(settings, state, event, now_s)
        case Measured():
            outcome = _on_measured(settings, state, event, now_s)
        case TrainingEnded() | ScoringEnded() | EvaluationEnded() | ModelsPlaced() | WorkFailed():
            outcome = on_ended(settings, state, event, now_s)
        case _:
            never(event)
    return outcome


# --- link and time ----------------------------------------------------------------------------------------------------


def _on_link_up(settings: AgentSettings, state: AgentState, now_s: float) -> Step:
    state = replace(
        state, connected=True, round_at_s=None, heartbeat_due_s=now_s + settings.heartbeat_s, telemetry_due_s=now_s
    )
    return state, _announce_presence(settings, now_s)


def _announce_presence(settings: AgentSettings, now_s: float) -> tuple[Action, ...]:
    """Send presence and profile: neither has an ack, and a device without a profile gets no task."""
    return (
        Publish(message=compose_presence(settings, now_s), retain=True),
        Publish(message=settings.profile, retain=True),
    )


def _on_tick(settings: AgentSettings, state: AgentState, now_s: float) -> Step:
    state, actions = _expire(settings, state, now_s)
    if state.connected and now_s >= state.heartbeat_due_s:
        state = replace(state, heartbeat_due_s=now_s + settings.heartbeat_s)
        actions += _announce_presence(settings, now_s)
    if state.connected and now_s >= state.telemetry_due_s:
        state = replace(state, telemetry_due_s=now_s + settings.telemetry_s)
        actions += (MeasureRegularly(),)
    if state.current is not None or state.running is not None or state.pending:
        state = replace(state, busy_at_s=now_s)
    if _may_leave(settings, state, now_s):
        actions += (Leave(),)
    return state, actions


def _expire(settings: AgentSettings, state: AgentState, now_s: float) -> Step:
    late = [entry for entry in state.pending if now_s >= entry.until_s]
    state = replace(state, pending=tuple(entry for entry in state.pending if entry not in late))
    actions: tuple[Action, ...] = tuple(Settle(message_id=entry.message.message_id) for entry in late)
    if state.current is not None and now_s >= state.current.deadline_at_s:
        detail = (
            f"no answer within the task's deadline of {state.current.task.deadline_s:g} s; it was {state.current.stage}"
        )
        state, more = refuse(settings, state, state.current.timeout_reason, detail, now_s)
        actions += more
    return state, actions


def _may_leave(settings: AgentSettings, state: AgentState, now_s: float) -> bool:
    if not settings.leave_when_finished or state.finished_at_s is None or state.current is not None:
        return False
    quiet_since_s = max(state.busy_at_s, state.finished_at_s)
    return now_s - quiet_since_s >= settings.linger_s or now_s - state.finished_at_s >= settings.leave_limit_s


# --- messages ---------------------------------------------------------------------------------------------------------


def _on_received(settings: AgentSettings, state: AgentState, event: Received, now_s: float) -> Step:
    message = event.message
    if isinstance(message, RoundInfo):
        return _on_round(state, message, now_s)
    if isinstance(message, Task):
        return _on_task(settings, state, message, now_s)
    if isinstance(message, Ack):
        # The ack of the profile settles nothing: a restarted server needs the profile again, and acks it again.
        return _settle(state, lambda pending: pending.message_id == message.of)
    return state, ()


def _on_round(state: AgentState, info: RoundInfo, now_s: float) -> Step:
    if is_stale(state, info, now_s):
        return state, ()
    state = replace(state, round=info, round_at_s=now_s)
    state, actions = _settle(state, lambda message: is_over(message, info))
    if state.current is not None and is_past(state.current.task, info):
        state, more = drop_task(state)
        actions += more
    if info.phase == "measure":
        actions += (MeasureForRound(info=info, pinned=state.saved.pinned),)
    over_at_s = (state.finished_at_s or now_s) if info.phase == "finished" else None
    return replace(state, finished_at_s=over_at_s), actions


def _on_task(settings: AgentSettings, state: AgentState, task: Task, now_s: float) -> Step:
    if task.client_id != settings.client_id:
        return state, ()
    known = state.current.task if state.current is not None else None
    if task.task_id in state.done or (known is not None and known.task_id == task.task_id):
        return state, (Publish(message=compose_ack(settings, task, "duplicate")),)
    overtaken = known is not None and known.run_id == task.run_id and is_before(task, known)
    if overtaken or (state.round is not None and state.round_at_s is not None and is_past(task, state.round)):
        return state, (Publish(message=compose_ack(settings, task, "refused", "a newer round is under way")),)
    state, actions = drop_task(state)
    current = CurrentTask(task=task, stage="waiting", lacking=frozenset(), arrived_at_s=now_s)
    state = replace(state, current=current, busy_at_s=now_s)
    actions += (Publish(message=compose_ack(settings, task, "accepted")),)
    foreign = [program.target for program in task.programs if program.target not in settings.profile.runtimes]
    if foreign and not isinstance(task.work, Deploy):
        detail = f"the program is for {foreign[0]!r}, but this device runs {list(settings.profile.runtimes)}"
        state, more = refuse(settings, state, "runtime", detail, now_s)
        actions += more
    elif isinstance(task.work, Evaluate) and not settings.profile.held_out_count:
        state, more = refuse(settings, state, "data", NO_HELD_OUT, now_s)
        actions += more
    return state, actions


def _settle(state: AgentState, done: Callable[[Telemetry | Answer], bool]) -> Step:
    settled = [entry for entry in state.pending if done(entry.message)]
    if not settled:
        return state, ()
    state = replace(state, pending=tuple(entry for entry in state.pending if entry not in settled))
    return state, tuple(Settle(message_id=entry.message.message_id) for entry in settled)


# --- readings ---------------------------------------------------------------------------------------------------------


def _on_measured(settings: AgentSettings, state: AgentState, event: Measured, now_s: float) -> Step:
    state = replace(state, reading=event.reading)
    measure = event.measure
    if isinstance(measure, MeasureForRound):
        run_id, number = measure.info.run_id, measure.info.round
        state = replace(state, survival=state.survival.enter_round(run_id, number, event.memory_budget_bytes))
    event = _limit_offer(state.survival, event)
    match measure:
        case MeasureForTask(task_id=task_id):
            outcome = on_task_measured(settings, state, task_id, event.memory_budget_bytes, now_s)
        case MeasureRegularly():
            outcome = state, (Publish(message=compose_telemetry(settings, event, now_s)),)
        case MeasureForRound():
            outcome = _answer_announcement(settings, state, compose_telemetry(settings, event, now_s), now_s)
        case _:
            never(measure)
    return outcome


def _answer_announcement(settings: AgentSettings, state: AgentState, message: Telemetry, now_s: float) -> Step:
    """Send the telemetry for an announcement, unless the announcement is out of date."""
    info = state.round
    if info is None or is_over(message, info):
        return state, ()
    others = tuple(entry for entry in state.pending if entry.message.message_id != message.message_id)
    pending = (*others, Pending(message=message, until_s=now_s + info.deadline_s))
    return replace(state, pending=pending, telemetry_due_s=now_s + settings.telemetry_s), (Keep(message=message),)


def _limit_offer(survival: Survival, event: Measured) -> Measured:
    """Limit a measurement to the budget that the device offers."""
    if survival.ceiling is None:
        return event
    low = event.log_low
    if low is not None:
        low = replace(low, memory_budget_bytes=survival.limit_budget(low.memory_budget_bytes))
    return replace(event, memory_budget_bytes=survival.limit_budget(event.memory_budget_bytes), log_low=low)
