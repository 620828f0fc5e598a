"""What an announcement of the server means for what is known, in hand and on its way."""

from subfleet.agent.states import AgentState
from subfleet.protocol.answers import Answer
from subfleet.protocol.messages import Evaluated, RoundInfo, Scores, Task, Telemetry, Update
from subfleet.protocol.task import Deploy

__all__ = ["is_before", "is_open", "is_over", "is_past", "is_stale"]

REORDER_S = 10.0
"""How late a broker may deliver: an older announcement that comes even later is news, as the server was set back."""


def is_stale(state: AgentState, info: RoundInfo, now_s: float) -> bool:
    """Whether an announcement is older than what is known, or none of this device's business."""
    known = state.round
    if known is None or known.run_id != info.run_id:
        # A broker may still hold the end of an older run; the end of a run without this device means nothing to it.
        return info.phase == "finished"
    # Within a try of a round the phases may repeat: a server that was started anew measures again.
    older = (info.round, info.retry, info.phase == "finished") < (known.round, known.retry, known.phase == "finished")
    return older and state.round_at_s is not None and now_s - state.round_at_s < REORDER_S


def is_over(message: Telemetry | Answer, info: RoundInfo) -> bool:
    """Whether nobody waits for a pending message any more."""
    if message.run_id != info.run_id:
        return True
    if isinstance(message, Telemetry):
        return info.phase != "measure" or (message.round, message.retry) != (info.round, info.retry)
    if isinstance(message, Scores):
        return info.phase == "finished" or message.round < info.round
    return info.phase == "finished" and isinstance(message, (Update, Evaluated))


def is_past(task: Task, info: RoundInfo) -> bool:
    """Whether a training can no longer take part in anything; models are worth having at any time."""
    if isinstance(task.work, Deploy):
        return False
    return task.run_id != info.run_id or is_before(task, info) or info.phase == "finished"


def is_before(task: Task, other: Task | RoundInfo) -> bool:
    """Whether a task belongs to an earlier try of a round, or to an earlier round of the run, than something else."""
    return (task.round, task.retry) < (other.round, other.retry)


def is_open(info: RoundInfo | None, task: Task) -> bool:
    """Whether a task's time has come: its round says where a replayed log is read, so a training waits for it."""
    if isinstance(task.work, Deploy):
        return True
    if info is None or info.phase == "finished":
        return False
    return (info.run_id, info.round, info.retry) == (task.run_id, task.round, task.retry)
