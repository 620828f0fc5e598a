"""Compares announcements with the state, with tasks and with pending messages."""

from subfleet.agent.states import AgentState
from subfleet.protocol.answers import Answer
from subfleet.protocol.messages import Evaluated, RoundInfo, Scores, Task, Telemetry, Update
from subfleet.protocol.task import Deploy

REORDER_S = 10.0
"""How late a broker may deliver. An older announcement that arrives even later is valid: the server was set back."""


def is_stale(state: AgentState, info: RoundInfo, now_s: float) -> bool:
    """Whether an announcement is older than the known one, or irrelevant for this device."""
    known = state.round
    if known is None or known.run_id != info.run_id:
        # A broker may still retain the end of an older run, which is irrelevant here.
        return info.phase == "finished"
    # Within an attempt of a round the phases may repeat: a restarted server measures again.
    older = (info.round, info.attempt, info.phase == "finished") < (
        known.round,
        known.attempt,
        known.phase == "finished",
    )
    return older and state.round_at_s is not None and now_s - state.round_at_s < REORDER_S


def is_over(message: Telemetry | Answer, info: RoundInfo) -> bool:
    """Whether the server no longer waits for a pending message."""
    if message.run_id != info.run_id:
        return True
    if isinstance(message, Telemetry):
        asked = info.phase == "measure" or info.asynchronous
        return not asked or (message.round, message.attempt) != (info.round, info.attempt)
    if isinstance(message, Scores):
        return info.phase == "finished" or message.round < info.round
    return info.phase == "finished" and isinstance(message, (Update, Evaluated))


def is_past(task: Task, info: RoundInfo) -> bool:
    """Whether the result of a task is of no use any more; models are useful at any time."""
    if isinstance(task.work, Deploy):
        return False
    overtaken = is_before(task, info) and not info.asynchronous
    return task.run_id != info.run_id or overtaken or info.phase == "finished"


def is_before(task: Task, other: Task | RoundInfo) -> bool:
    """Whether a task belongs to an earlier round, or an earlier attempt of the round, than another task or round."""
    return (task.round, task.attempt) < (other.round, other.attempt)


def is_open(info: RoundInfo | None, task: Task) -> bool:
    """Whether a task may start: it waits for its round's announcement, which gives the time in a replayed log."""
    if isinstance(task.work, Deploy):
        return True
    if info is None or info.phase == "finished":
        return False
    if info.asynchronous and info.run_id == task.run_id:
        return True
    return (info.run_id, info.round, info.attempt) == (task.run_id, task.round, task.attempt)
