"""What a message of a device deserves, and what a device is told that gets no task. Pure."""

import math
from typing import Literal

from subfleet.protocol.evaluating import totals_of
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Ack, ArchitectureProblem, Deployed, Evaluated, Refusal, Scores, Update
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train, Work
from subfleet.protocol.task_kinds import oddity
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import declared_of
from subfleet.rounds.progress import PhaseName
from subfleet.rounds.signals import Reply
from subfleet.rounds.state import ClientState, RunState, Stage
from subfleet.rounds.tasks import score_task_id

Verdict = Literal["accepted", "duplicate", "refused"]
_Answer = Update | Refusal | Deployed | Scores | Evaluated
MAX_HEADER_BYTES = 1024 * 1024
"""By how much an update's container may be larger than the weights that it changes."""


def reply(
    client_id: str,
    message_id: str,
    status: Verdict,
    reason: str = "",
    *,
    problem: ArchitectureProblem | None = None,
) -> Reply:
    """An ack for a message; its own id follows from it, as nothing here is drawn."""
    own_id = f"ack/{message_id}"
    ack = Ack(of=message_id, status=status, reason=reason, message_id=own_id, problem=problem)
    return Reply(client_id=client_id, ack=ack)


def judge(context: RunContext, state: RunState, answer: _Answer) -> tuple[Verdict, str]:
    """Whether an answer to a task counts, was counted before, or is refused and why."""
    if answer.run_id != context.run_id:
        return "refused", f"run {answer.run_id!r:.80} is not the current run {context.run_id!r}"
    if answer.task_id in state.settled:
        return "duplicate", ""
    client = state.clients.get(answer.client_id)
    if client is None or (not isinstance(answer, Deployed) and answer.round != state.round):
        return "refused", f"task {answer.task_id!r:.120} is closed; the run is in round {state.round}"
    if not _is_for(client, answer):
        return _judge_other_task(context, state, client, answer)
    return _judge_stage(context, state, client, answer)


def _is_for(client: ClientState, answer: _Answer) -> bool:
    return client.task is not None and client.task.task_id == answer.task_id


def _judge_other_task(
    context: RunContext, state: RunState, client: ClientState, answer: _Answer
) -> tuple[Verdict, str]:
    """An answer to an earlier task of this round: its refusal, or its scores, are why there is a newer one."""
    if isinstance(answer, Refusal) and client.attempt > 0:
        return "duplicate", ""
    if isinstance(answer, (Refusal, Scores)) and client.stage != "scoring" and client.proposals:
        was_scored = answer.task_id == score_task_id(context, state, answer.client_id)
        return ("duplicate", "") if was_scored else _not_the_last(answer)
    return _not_the_last(answer)


def _not_the_last(answer: _Answer) -> tuple[Verdict, str]:
    return "refused", f"task {answer.task_id!r:.120} is not the one that {answer.client_id} was given last"


def _judge_stage(context: RunContext, state: RunState, client: ClientState, answer: _Answer) -> tuple[Verdict, str]:
    if client.task is None or not _answers(client.task.work, answer):
        return "refused", f"a message of kind {answer.KIND!r} is no answer to that task"
    if client.stage == ("refused" if isinstance(answer, Refusal) else "done"):
        return "duplicate", ""
    phases, stage = _awaited(client.task.work)
    if state.phase not in phases or client.stage != stage:
        return "refused", f"the task is closed: {client.stage} {client.reason}".rstrip()
    odd = _odd(context, state, client, client.task, answer)
    return ("refused", odd) if odd else ("accepted", "")


def _odd(context: RunContext, state: RunState, client: ClientState, task: Task, answer: _Answer) -> str:
    """What is wrong with an answer to a task; nothing where it may be believed so far."""
    match answer:
        case Update():
            limit_bytes = MAX_HEADER_BYTES + sum(blob.size_bytes for blob in task.weights)
            if answer.blob.size_bytes > limit_bytes:
                return f"the update is {answer.blob.size_bytes} bytes, but may be {limit_bytes} at most"
            return _odd_examples(context, state, task, answer)
        case Scores():
            if len(answer.scores) != len(task.programs):
                asked = len(task.programs)
                return f"there are {len(answer.scores)} scores, but {asked} candidates were to be scored"
        case Evaluated():
            return _odd_scores(context, task, answer) or _odd_evaluation(context, client, task, answer)
        case _:
            pass  # nothing of them is counted
    return ""


def _odd_examples(context: RunContext, state: RunState, task: Task, answer: Update) -> str:
    """What counts of examples say that cannot be: each went through one operator of each choice, in each epoch."""
    work = task.work
    if not isinstance(work, Train) or work.paths is None:
        return f"examples of {len(answer.operator_examples)} choices are told, but no paths were drawn" * bool(
            answer.operator_examples
        )
    kept = declared_of(context, state.lineages, task.architecture).network.operators_of(task.architecture)
    if {choice for choice, _ in answer.operator_examples} != kept.keys():
        return "examples are not told for every choice of the supernet and for no other, but must be"
    expected = work.settings.passes_over(answer.sample_count)
    for choice, counts in answer.operator_examples:
        if not {operator for operator, _ in counts} <= set(kept[choice]):
            return f"examples of choice {choice!r:.80} are told of operators that its subspace lacks"
        total = sum(count for _, count in counts)
        if total != expected:
            return f"{total} examples went through choice {choice!r:.80}, but {expected} were trained on"
    return ""


def _odd_scores(context: RunContext, task: Task, answer: Evaluated) -> str:
    """What is wrong with the scores of paths; nothing where none were asked for, and none are told."""
    asked = len(task.work.settings.population) if isinstance(task.work, Evaluate) else 0
    if len(answer.scores) != asked:
        return f"there are scores of {len(answer.scores)} paths, but {asked} were to be scored"
    most = answer.sample_count * _labels(context)
    if answer.label_count > most:
        return f"{answer.label_count} labels were counted, but {answer.sample_count} samples have {most} at most"
    return ""


def _labels(context: RunContext) -> int:
    """Of one sample, at most."""
    shape, model = context.config.label_shape, context.config.model
    return math.prod((*model.input_shape, model.class_count) if shape is None else shape)


def _odd_evaluation(context: RunContext, client: ClientState, task: Task, answer: Evaluated) -> str:
    """What an evaluation says that cannot be; nothing where all can."""
    if answer.sample_count > client.offer.sample_count:
        return f"{answer.sample_count} samples were evaluated, but the client's profile has {client.offer.sample_count}"
    classes, counted = context.config.model.class_count, len(answer.class_counts)
    kind = context.config.training.objective.kind
    asked = isinstance(task.work, Evaluate) and task.work.settings.per_class
    if counted and (not asked or counted != classes):
        return f"{counted} classes were counted, but the model has {classes} and was asked for " + (
            "each" if asked else "none"
        )
    return "" if answer.scores else oddity(kind, totals_of(answer), classes)


def _answers(work: Work, answer: _Answer) -> bool:
    """Whether a message of this kind may answer such a task."""
    if isinstance(answer, Refusal):
        return True
    match work:
        case Train() | Calibrate():
            fits = isinstance(answer, Update)
        case Score():
            fits = isinstance(answer, Scores)
        case Evaluate():
            fits = isinstance(answer, Evaluated)
        case Deploy():
            fits = isinstance(answer, Deployed)
        case _:
            never(work)
    return fits


def _awaited(work: Work) -> tuple[tuple[PhaseName, ...], Stage]:
    """The phases of the run and the stage of the client state in which such a task is answered."""
    match work:
        case Train() | Calibrate():
            awaited: tuple[tuple[PhaseName, ...], Stage] = ("train",), "out"
        case Evaluate():
            awaited = ("evaluate", "search"), "out"
        case Score():
            awaited = ("train",), "scoring"
        case Deploy():
            awaited = ("deploy",), "out"
        case _:
            never(work)
    return awaited


def skip_notice(client: ClientState | None) -> tuple[Reply, ...]:
    """What the client of a client state is told of it; nothing where it takes part or has told nothing."""
    if client is None or client.stage != "skipped" or not client.offer.telemetry_id:
        return ()
    ack = Ack(
        of=client.offer.telemetry_id,
        status="accepted",
        reason=client.reason,
        message_id=f"skipped/{client.offer.telemetry_id}",
    )
    return (Reply(client_id=client.client_id, ack=ack),)


def skip_notices(before: RunState, after: RunState) -> tuple[Reply, ...]:
    """What clients are told whose state a step has skipped."""
    if after.clients is before.clients:
        return ()
    new = (client for name, client in after.clients.items() if client is not before.clients.get(name))
    return tuple(notice for client in new for notice in skip_notice(client))
