"""The stages of the current task, from arrival to answer. Pure, as all of the agent.

A task is weighed, fetched, measured for and worked on, in that order, and ends in one answer. Events about other tasks
change nothing.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from subfleet.agent.actions import (
    Action,
    CancelFetch,
    Fetch,
    Keep,
    MeasureForTask,
    PlaceModels,
    Prune,
    StartWork,
    StopWork,
    Weigh,
)
from subfleet.agent.announcements import is_open
from subfleet.agent.composing import (
    compose_deployment,
    compose_evaluation,
    compose_refusal,
    compose_scores,
    compose_update,
)
from subfleet.agent.events import BlobArrived, BlobFailed, Weighed
from subfleet.agent.outcomes import Ended, EvaluationEnded, ModelsPlaced, ScoringEnded, TrainingEnded, WorkFailed
from subfleet.agent.states import AgentSettings, AgentState, Pending
from subfleet.agent.survival import FATAL_DEATHS
from subfleet.agent.weighing import find_objection
from subfleet.protocol.answers import Answer
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import RefusalReason, Task
from subfleet.protocol.task import Deploy

Step = tuple[AgentState, tuple[Action, ...]]
"""The state after an event, and the actions."""

KEPT_TASK_IDS = 64
KEPT_PROGRAMS = 32


def advance(state: AgentState) -> Step:
    """Advance the current task as far as possible without a further event."""
    actions: tuple[Action, ...] = ()
    current = state.current
    if current is not None and current.stage == "waiting" and is_open(state.round, current.task):
        current = replace(current, stage="weighing")
        actions += (Weigh(task=current.task, pinned=state.saved.pinned),)
    if current is not None and current.stage == "fetching" and not current.lacking and state.running is None:
        if isinstance(current.task.work, Deploy):
            current = replace(current, stage="working")
            actions += (PlaceModels(task=current.task),)
        else:
            current = replace(current, stage="measuring")
            log_time_s = state.round.log_time_s if state.round is not None else None
            actions += (MeasureForTask(task_id=current.task.task_id, log_time_s=log_time_s),)
    return (state if current is state.current else replace(state, current=current)), actions


def on_weighed(settings: AgentSettings, state: AgentState, event: Weighed, now_s: float) -> Step:
    """Refuse a task that does not fit disk or link, else fetch its blobs."""
    current = state.current
    if current is None or current.stage != "weighing" or current.task.task_id != event.task_id:
        return state, ()
    against = find_objection(current.task, event, state.reading, current.deadline_at_s - now_s)
    if against is not None:
        return refuse(settings, state, against.reason, against.detail, now_s, against.available_bytes)
    # Blobs that are here are fetched, too: their digests are checked, and damaged ones are fetched again.
    blobs = current.task.blobs
    current = replace(current, stage="fetching", lacking=frozenset(blob.sha256 for blob in blobs))
    return replace(state, current=current), tuple(Fetch(blob=blob) for blob in blobs)


def on_blob(settings: AgentSettings, state: AgentState, event: BlobArrived | BlobFailed, now_s: float) -> Step:
    """Note a fetched blob; refuse the task if a blob cannot be fetched."""
    if state.current is None or event.sha256 not in state.current.lacking:
        return state, ()
    if isinstance(event, BlobFailed):
        return refuse(settings, state, event.reason, event.detail, now_s)
    current = replace(state.current, lacking=state.current.lacking - {event.sha256})
    return replace(state, current=current), ()


def on_task_measured(settings: AgentSettings, state: AgentState, task_id: str, budget_bytes: int, now_s: float) -> Step:
    """Start the work if its planned peak fits the budget, else refuse it."""
    current = state.current
    if current is None or current.stage != "measuring" or current.task.task_id != task_id:
        return state, ()
    planned_bytes = current.task.planned_peak_bytes
    if planned_bytes > budget_bytes:
        detail = f"the program needs {planned_bytes} bytes, but {budget_bytes} bytes are free for training now"
        ceiling = state.survival.ceiling
        if ceiling is not None and budget_bytes == ceiling.memory_bytes:
            detail = (
                f"the program needs {planned_bytes} bytes, but the device offers only {budget_bytes} bytes since its "
                "process ended during work"
            )
        return refuse(settings, state, "memory", detail, now_s, budget_bytes)
    survival = state.survival.start_work(current.task, budget_bytes)
    state = replace(state, current=replace(current, stage="working"), running=current.task.task_id, survival=survival)
    return state, (StartWork(task=current.task, memory_limit_bytes=budget_bytes),)


def on_ended(settings: AgentSettings, state: AgentState, event: Ended, now_s: float) -> Step:
    """Answer with the result, or with a refusal if there is no valid result."""
    state = _release_worker(state, event)
    current = state.current
    if current is None or current.task.task_id != event.task_id:
        # The task was dropped; the blob of its update is removed with all other unused blobs.
        return state, ((Prune(keep=state.saved.blobs),) if isinstance(event, TrainingEnded) else ())
    match event:
        case TrainingEnded(result=result):
            if not (math.isfinite(result.loss) and math.isfinite(result.accuracy)):
                detail = f"the loss is {result.loss} after {result.step_count} steps; try a smaller learning rate"
                return refuse(settings, state, "diverged", detail, now_s)
            state = _keep_files(state, current.task)
            outcome = _answer_with(settings, state, lambda: compose_update(settings, current, event, now_s), now_s)
        case ScoringEnded():
            outcome = _answer_with(settings, state, lambda: compose_scores(settings, current, event, now_s), now_s)
        case EvaluationEnded():
            state = _keep_files(state, current.task)
            outcome = _answer_with(settings, state, lambda: compose_evaluation(settings, current, event, now_s), now_s)
        case ModelsPlaced():
            outcome = _answer_with(settings, state, lambda: compose_deployment(settings, current, event), now_s)
        case WorkFailed():
            outcome = refuse(settings, state, event.reason, event.detail, now_s, event.available_bytes)
        case _:
            never(event)
    return outcome


def _keep_files(state: AgentState, task: Task) -> AgentState:
    """Keep the program of a task and its frozen weights: the next round probably uses them again."""
    (submodel,) = task.submodels
    programs, frozen = _append_recent(state.programs, submodel.program.blob.sha256, KEPT_PROGRAMS), state.frozen
    if submodel.frozen is not None:
        frozen = _append_recent(frozen, submodel.frozen.sha256, KEPT_PROGRAMS)
    return replace(state, programs=programs, frozen=frozen)


def _release_worker(state: AgentState, event: Ended) -> AgentState:
    if state.running != event.task_id:
        return state
    in_hand = state.current is not None and state.current.task.task_id == event.task_id
    if not isinstance(event, WorkFailed):
        survival = state.survival.end_work()
    elif event.killed:
        survival = state.survival.note_kill(state.round)
    else:
        # A task that was stopped does not show that the process would have survived the rest of it.
        survival = state.survival.end_work() if in_hand else state.survival.stop_work()
    return replace(state, running=None, survival=survival)


def refuse(
    settings: AgentSettings,
    state: AgentState,
    reason: RefusalReason,
    detail: str,
    now_s: float,
    available_bytes: int | None = None,
) -> Step:
    """Refuse the current task, and stop its transfers and work."""
    current = state.current
    if current is None:
        return state, ()
    dropped, actions = drop_task(state)
    answered, more = _answer(
        settings, dropped, compose_refusal(settings, current, reason, detail, available_bytes), now_s
    )
    return answered, actions + more


def refuse_fatal(settings: AgentSettings, state: AgentState, now_s: float) -> Step:
    """Refuse the current task, at which earlier processes died, with the budget that follows."""
    ceiling = state.survival.ceiling
    offered_bytes = 0 if ceiling is None else ceiling.memory_bytes
    detail = (
        f"the device's process ended {FATAL_DEATHS} times in a row during work, the last time on this task, probably "
        f"because memory ran out; the device now offers {offered_bytes} bytes"
    )
    return refuse(settings, state, "memory", detail, now_s, offered_bytes)


def _answer_with(settings: AgentSettings, state: AgentState, compose: Callable[[], Answer], now_s: float) -> Step:
    """Answer with a result, or with a refusal if it is invalid: programs and plug-ins may return anything."""
    try:
        answer = compose()
    except ValueError as error:
        return refuse(settings, state, "failed", f"the result cannot be sent: {error}", now_s)
    return _answer(settings, state, answer, now_s)


def _answer(settings: AgentSettings, state: AgentState, answer: Answer, now_s: float) -> Step:
    state = replace(
        state,
        current=None,
        done=_append_recent(state.done, answer.task_id),
        pending=(*state.pending, Pending(message=answer, until_s=now_s + settings.keep_s)),
        busy_at_s=now_s,
    )
    return state, (Keep(message=answer),)


def drop_task(state: AgentState) -> Step:
    """Drop the current task: cancel its transfers, and stop the worker."""
    current = state.current
    if current is None:
        return state, ()
    actions: tuple[Action, ...] = tuple(
        CancelFetch(blob=blob) for blob in current.task.blobs if blob.sha256 in current.lacking
    )
    if state.running == current.task.task_id:
        actions += (StopWork(task_id=current.task.task_id),)
    return replace(state, current=None, done=_append_recent(state.done, current.task.task_id)), actions


def _append_recent(known: tuple[str, ...], newest: str, most: int = KEPT_TASK_IDS) -> tuple[str, ...]:
    return (*(task_id for task_id in known if task_id != newest), newest)[-most:]
