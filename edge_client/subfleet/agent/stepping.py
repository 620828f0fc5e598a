"""The agent: what a device does about everything that happens to it, as one pure function.

`step` takes a state, an event and the time, and returns the new state and what is to be done. It reads no clock, draws
no number and touches no file, so that every sequence of events can be tried in a test. What holds always:

- one task at a time: nothing is trained before the worker has ended what it trained before;
- a task that was answered or replaced is never trained again, however often it comes;
- a newer task takes the place of an older one, and a round that has moved on ends the older round's task;
- an answer is written to disk before it is sent, and kept until its receipt or the end of its run;
- every wait has a deadline.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from subfleet.agent.announcements import is_before, is_open, is_over, is_past, is_stale
from subfleet.agent.composing import deployed, evaluated, presence, receipt, refusal, scores, telemetry, update
from subfleet.agent.states import (
    Action,
    AgentSettings,
    AgentState,
    BlobArrived,
    BlobFailed,
    CancelFetch,
    EvaluationEnded,
    Event,
    Fetch,
    Job,
    Keep,
    Leave,
    LinkDown,
    LinkUp,
    Measure,
    Measured,
    Pending,
    Place,
    Placed,
    Prune,
    Publish,
    Received,
    Save,
    Saved,
    Scored,
    Settle,
    StopTraining,
    Tick,
    Train,
    Trained,
    WorkFailed,
)
from subfleet.agent.weighing import Weigh, Weighed, objection
from subfleet.protocol.answers import Answer
from subfleet.protocol.evaluating import NO_HELD_OUT
from subfleet.protocol.messages import Receipt, RefusalReason, RoundInfo, Task, Telemetry

__all__ = ["start", "step"]

Step = tuple[AgentState, tuple[Action, ...]]

KEPT_TASK_IDS = 64
KEPT_PROGRAMS = 32


def start(settings: AgentSettings, saved: Saved, now_s: float) -> Step:
    """Begin, or take up what an earlier process left: send its answers again and do its unanswered task anew."""
    job = None
    if saved.task is not None:
        job = Job(task=saved.task, stage="waiting", lacking=frozenset(), arrived_at_s=now_s)
    state = AgentState(
        round=saved.round,
        job=job,
        pending=tuple(Pending(message=answer, until_s=now_s + settings.keep_s) for answer in saved.answers()),
        done=saved.done,
        programs=saved.programs,
        busy_at_s=now_s,
    )
    return state, tuple(Keep(message=entry.message) for entry in state.pending)


def step(settings: AgentSettings, state: AgentState, event: Event, now_s: float) -> Step:
    """What an event leads to. Whatever must outlive the process is saved before anything is sent."""
    after, actions = _HANDLERS[type(event)](settings, state, event, now_s)
    after, more = _advance(after)
    actions += more
    before_saved, saved = state.saved(), after.saved()
    if before_saved != saved:
        # A receipt or the end of a task frees blobs; they go only after the file no longer names them.
        freed: tuple[Action, ...] = (Prune(keep=saved.blobs()),) if before_saved.blobs() - saved.blobs() else ()
        actions = (Save(saved=saved), *actions, *freed)
    return after, actions


# --- link and time ----------------------------------------------------------------------------------------------------


def _on_link_up(settings: AgentSettings, state: AgentState, _event: LinkUp, now_s: float) -> Step:
    state = replace(
        state, connected=True, round_at_s=None, heartbeat_due_s=now_s + settings.heartbeat_s, telemetry_due_s=now_s
    )
    return state, _signs_of_life(settings, now_s)


def _signs_of_life(settings: AgentSettings, now_s: float) -> tuple[Action, ...]:
    """The profile goes with every heartbeat: neither ends in a receipt, and a device without a profile gets no task."""
    return (
        Publish(message=presence(settings, now_s), retain=True),
        Publish(message=settings.profile, retain=True),
    )


def _on_link_down(_settings: AgentSettings, state: AgentState, _event: LinkDown, _now_s: float) -> Step:
    return replace(state, connected=False), ()


def _on_tick(settings: AgentSettings, state: AgentState, _event: Tick, now_s: float) -> Step:
    state, actions = _expire(settings, state, now_s)
    if state.connected and now_s >= state.heartbeat_due_s:
        state = replace(state, heartbeat_due_s=now_s + settings.heartbeat_s)
        actions += _signs_of_life(settings, now_s)
    if state.connected and now_s >= state.telemetry_due_s:
        state = replace(state, telemetry_due_s=now_s + settings.telemetry_s)
        actions += (Measure(purpose="live"),)
    if state.job is not None or state.running is not None or state.pending:
        state = replace(state, busy_at_s=now_s)
    if _may_leave(settings, state, now_s):
        actions += (Leave(),)
    return state, actions


def _expire(settings: AgentSettings, state: AgentState, now_s: float) -> Step:
    late = [entry for entry in state.pending if now_s >= entry.until_s]
    state = replace(state, pending=tuple(entry for entry in state.pending if entry not in late))
    actions: tuple[Action, ...] = tuple(Settle(message_id=entry.message.message_id) for entry in late)
    if state.job is not None and now_s >= state.job.deadline_at_s:
        detail = f"no answer within the task's deadline of {state.job.task.deadline_s:g} s; it was {state.job.stage}"
        state, more = _refuse(settings, state, state.job.exhausted, detail, now_s)
        actions += more
    return state, actions


def _may_leave(settings: AgentSettings, state: AgentState, now_s: float) -> bool:
    if not settings.leave_when_finished or state.finished_at_s is None or state.job is not None:
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
    if isinstance(message, Receipt):
        # That of the profile settles nothing: a server that starts anew must know the device, and answers it again.
        return _settle(state, lambda pending: pending.message_id == message.of)
    return state, ()


def _on_round(state: AgentState, info: RoundInfo, now_s: float) -> Step:
    if is_stale(state, info, now_s):
        return state, ()
    state = replace(state, round=info, round_at_s=now_s)
    state, actions = _settle(state, lambda message: is_over(message, info))
    if state.job is not None and is_past(state.job.task, info):
        state, more = _drop_job(state)
        actions += more
    if info.phase == "measure":
        measure = Measure(
            purpose="round",
            run_id=info.run_id,
            round=info.round,
            retry=info.retry,
            log_time_s=info.log_time_s,
            log_quantile=info.log_quantile,
            pinned=state.saved().pinned(),
        )
        actions += (measure,)
    over_at_s = (state.finished_at_s or now_s) if info.phase == "finished" else None
    return replace(state, finished_at_s=over_at_s), actions


def _on_task(settings: AgentSettings, state: AgentState, task: Task, now_s: float) -> Step:
    if task.client_id != settings.client_id:
        return state, ()
    known = state.job.task if state.job is not None else None
    if task.task_id in state.done or (known is not None and known.task_id == task.task_id):
        return state, (Publish(message=receipt(settings, task, "duplicate")),)
    overtaken = known is not None and known.run_id == task.run_id and is_before(task, known)
    if overtaken or (state.round is not None and state.round_at_s is not None and is_past(task, state.round)):
        return state, (Publish(message=receipt(settings, task, "refused", "a newer round is under way")),)
    state, actions = _drop_job(state)
    job = Job(task=task, stage="waiting", lacking=frozenset(), arrived_at_s=now_s)
    state = replace(state, job=job, busy_at_s=now_s)
    actions += (Publish(message=receipt(settings, task, "accepted")),)
    foreign = [one.target for one in task.programs if one.target not in settings.profile.runtimes]
    if task.work != "deploy" and foreign:
        detail = f"the program is for {foreign[0]!r}, but this device runs {list(settings.profile.runtimes)}"
        state, more = _refuse(settings, state, "runtime", detail, now_s)
        actions += more
    elif task.work == "evaluate" and not settings.profile.held_out_count:
        state, more = _refuse(settings, state, "data", NO_HELD_OUT, now_s)
        actions += more
    return state, actions


def _settle(state: AgentState, done: Callable[[Telemetry | Answer], bool]) -> Step:
    settled = [entry for entry in state.pending if done(entry.message)]
    state = replace(state, pending=tuple(entry for entry in state.pending if entry not in settled))
    return state, tuple(Settle(message_id=entry.message.message_id) for entry in settled)


# --- work -------------------------------------------------------------------------------------------------------------


def _advance(state: AgentState) -> Step:
    """Move the job on as far as it goes without a further event."""
    actions: tuple[Action, ...] = ()
    job = state.job
    if job is not None and job.stage == "waiting" and is_open(state.round, job.task):
        job = replace(job, stage="weighing")
        actions += (Weigh(task=job.task, pinned=state.saved().pinned()),)
    if job is not None and job.stage == "fetching" and not job.lacking and state.running is None:
        if job.task.work == "deploy":
            job = replace(job, stage="working")
            actions += (Place(task=job.task),)
        else:
            job = replace(job, stage="measuring")
            log_time_s = state.round.log_time_s if state.round is not None else None
            actions += (Measure(purpose="task", task_id=job.task.task_id, log_time_s=log_time_s),)
    return replace(state, job=job), actions


def _on_weighed(settings: AgentSettings, state: AgentState, event: Weighed, now_s: float) -> Step:
    job = state.job
    if job is None or job.stage != "weighing" or job.task.task_id != event.task_id:
        return state, ()
    against = objection(job.task, event, state.reading, job.deadline_at_s - now_s)
    if against is not None:
        return _refuse(settings, state, against.reason, against.detail, now_s, against.available_bytes)
    # What is here is fetched, too: its digest is checked, and a damaged one comes anew.
    blobs = job.task.blobs
    job = replace(job, stage="fetching", lacking=frozenset(blob.sha256 for blob in blobs))
    return replace(state, job=job), tuple(Fetch(blob=blob) for blob in blobs)


def _on_blob_arrived(_settings: AgentSettings, state: AgentState, event: BlobArrived, _now_s: float) -> Step:
    if state.job is None or event.sha256 not in state.job.lacking:
        return state, ()
    job = replace(state.job, lacking=state.job.lacking - {event.sha256})
    return replace(state, job=job), ()


def _on_blob_failed(settings: AgentSettings, state: AgentState, event: BlobFailed, now_s: float) -> Step:
    if state.job is None or event.sha256 not in state.job.lacking:
        return state, ()
    return _refuse(settings, state, event.reason, event.detail, now_s)


def _on_measured(settings: AgentSettings, state: AgentState, event: Measured, now_s: float) -> Step:
    state = replace(state, reading=event.reading)
    if event.measure.purpose == "task":
        return _on_task_measured(settings, state, event, now_s)
    message = telemetry(settings, event, now_s)
    info = state.round
    if event.measure.purpose == "live":
        return state, (Publish(message=message),)
    if info is None or is_over(message, info):
        return state, ()
    others = tuple(entry for entry in state.pending if entry.message.message_id != message.message_id)
    pending = (*others, Pending(message=message, until_s=now_s + info.deadline_s))
    return replace(state, pending=pending, telemetry_due_s=now_s + settings.telemetry_s), (Keep(message=message),)


def _on_task_measured(settings: AgentSettings, state: AgentState, event: Measured, now_s: float) -> Step:
    job = state.job
    if job is None or job.stage != "measuring" or job.task.task_id != event.measure.task_id:
        return state, ()
    budget_bytes, planned_bytes = event.memory_budget_bytes, job.task.planned_peak_bytes
    if planned_bytes > budget_bytes:
        detail = f"the program needs {planned_bytes} bytes, but {budget_bytes} bytes are free for training now"
        return _refuse(settings, state, "memory", detail, now_s, budget_bytes)
    state = replace(state, job=replace(job, stage="working"), running=job.task.task_id)
    return state, (Train(task=job.task, memory_limit_bytes=budget_bytes),)


def _on_trained(settings: AgentSettings, state: AgentState, event: Trained, now_s: float) -> Step:
    state = _worker_free(state, event.task_id)
    job, result = state.job, event.result
    if job is None or job.task.task_id != event.task_id:
        # Nobody waits for it any more; its blob goes with the others that no file names.
        return state, (Prune(keep=state.saved().blobs()),)
    if not (math.isfinite(result.loss) and math.isfinite(result.accuracy)):
        detail = f"the loss is {result.loss} after {result.step_count} steps; try a smaller learning rate"
        return _refuse(settings, state, "diverged", detail, now_s)
    return _answer(settings, _keeping(state, job.task), update(settings, job, event, now_s), now_s)


def _keeping(state: AgentState, task: Task) -> AgentState:
    """Its program is worth its room: the next round has a task of the same."""
    program = task.programs[0].blob.sha256
    return replace(state, programs=_with(state.programs, program, KEPT_PROGRAMS))


def _on_found(settings: AgentSettings, state: AgentState, event: Scored | EvaluationEnded, now_s: float) -> Step:
    """What was found is the answer: there is no blob."""
    state = _worker_free(state, event.task_id)
    job = state.job
    if job is None or job.task.task_id != event.task_id:
        return state, ()
    if isinstance(event, Scored):
        return _answer(settings, state, scores(settings, job, event, now_s), now_s)
    return _answer(settings, _keeping(state, job.task), evaluated(settings, job, event, now_s), now_s)


def _on_placed(settings: AgentSettings, state: AgentState, event: Placed, now_s: float) -> Step:
    job = state.job
    if job is None or job.task.task_id != event.task_id:
        return state, ()
    return _answer(settings, state, deployed(settings, job, event), now_s)


def _on_work_failed(settings: AgentSettings, state: AgentState, event: WorkFailed, now_s: float) -> Step:
    state = _worker_free(state, event.task_id)
    if state.job is None or state.job.task.task_id != event.task_id:
        return state, ()
    return _refuse(settings, state, event.reason, event.detail, now_s, event.available_bytes)


def _worker_free(state: AgentState, task_id: str) -> AgentState:
    return replace(state, running=None) if state.running == task_id else state


def _refuse(
    settings: AgentSettings,
    state: AgentState,
    reason: RefusalReason,
    detail: str,
    now_s: float,
    available_bytes: int | None = None,
) -> Step:
    """Answer the job with a refusal, and end whatever was being done for it."""
    job = state.job
    if job is None:
        return state, ()
    dropped, actions = _drop_job(state)
    answered, more = _answer(settings, dropped, refusal(settings, job, reason, detail, available_bytes), now_s)
    return answered, actions + more


def _answer(settings: AgentSettings, state: AgentState, answer: Answer, now_s: float) -> Step:
    state = replace(
        state,
        job=None,
        done=_with(state.done, answer.task_id),
        pending=(*state.pending, Pending(message=answer, until_s=now_s + settings.keep_s)),
        busy_at_s=now_s,
    )
    return state, (Keep(message=answer),)


def _drop_job(state: AgentState) -> Step:
    """Let go of the job: cancel its transfers, and tell the worker to stop."""
    job = state.job
    if job is None:
        return state, ()
    actions: tuple[Action, ...] = tuple(CancelFetch(blob=blob) for blob in job.task.blobs if blob.sha256 in job.lacking)
    if state.running == job.task.task_id:
        actions += (StopTraining(task_id=job.task.task_id),)
    return replace(state, job=None, done=_with(state.done, job.task.task_id)), actions


def _with(known: tuple[str, ...], newest: str, most: int = KEPT_TASK_IDS) -> tuple[str, ...]:
    return (*(one for one in known if one != newest), newest)[-most:]


_HANDLERS: Mapping[type[Event], Callable[[AgentSettings, AgentState, Any, float], Step]] = MappingProxyType(
    {
        LinkUp: _on_link_up,
        LinkDown: _on_link_down,
        Tick: _on_tick,
        Received: _on_received,
        Weighed: _on_weighed,
        BlobArrived: _on_blob_arrived,
        BlobFailed: _on_blob_failed,
        Measured: _on_measured,
        Trained: _on_trained,
        Scored: _on_found,
        EvaluationEnded: _on_found,
        Placed: _on_placed,
        WorkFailed: _on_work_failed,
    }
)
