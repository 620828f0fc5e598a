"""Judges the messages of devices, and tells devices that get no task. Pure."""

import math
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from subfleet.protocol.answers import Answer, Deployed, Evaluated, Refusal, Scores, Update, sum_totals
from subfleet.protocol.messages import Ack, ArchitectureProblem
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train
from subfleet.protocol.task_kinds import find_contradiction
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import get_network
from subfleet.rounds.progress import PhaseName
from subfleet.rounds.signals import Reply
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.tasks import name_score_task

Verdict = Literal["accepted", "duplicate", "refused"]
MAX_HEADER_BYTES = 1024 * 1024
"""How much larger an update's container may be than the weights that it changes."""


_ANSWERS: Mapping[type, tuple[type[Answer], tuple[PhaseName, ...]]] = MappingProxyType(
    {
        Train: (Update, ("train",)),
        Calibrate: (Update, ("train",)),
        Score: (Scores, ("train",)),
        Evaluate: (Evaluated, ("evaluate", "search")),
        Deploy: (Deployed, ("deploy",)),
    }
)
"""By kind of work: the message type of its answer (unless it is refused), and the phases in which the answer counts."""


def reply(
    client_id: str, message_id: str, status: Verdict, reason: str = "", problem: ArchitectureProblem | None = None
) -> Reply:
    """An ack for a message; its own id is derived from that of the message."""
    ack = Ack(of=message_id, status=status, reason=reason, message_id=f"ack/{message_id}", problem=problem)
    return Reply(client_id=client_id, ack=ack)


def judge(context: RunContext, state: RunState, answer: Answer) -> tuple[Verdict, str]:
    """Whether an answer to a task counts, has been counted already, or is refused, and why."""
    if answer.run_id != context.run_id:
        return "refused", f"run {answer.run_id!r:.80} is not the current run {context.run_id!r}"
    if answer.task_id in state.settled:
        return "duplicate", ""
    client = state.clients.get(answer.client_id)
    begun = state.round if client is None or client.task is None else client.task.round
    if client is None or (not isinstance(answer, Deployed) and answer.round != begun):
        return "refused", f"task {answer.task_id!r:.120} is closed; the run is in round {state.round}"
    if client.task is None or client.task.task_id != answer.task_id:
        if _is_answered(context, state, client, answer):
            return "duplicate", ""
        return "refused", f"task {answer.task_id!r:.120} is not the last task of {answer.client_id}"
    return _judge_last_task(context, state, client, client.task, answer)


def _judge_last_task(
    context: RunContext, state: RunState, client: ClientState, task: Task, answer: Answer
) -> tuple[Verdict, str]:
    expected, phases = _ANSWERS[type(task.work)]
    if not isinstance(answer, (Refusal, expected)):
        return "refused", f"a message of kind {answer.KIND!r} does not answer that task"
    if client.stage == ("refused" if isinstance(answer, Refusal) else "done"):
        return "duplicate", ""
    if state.phase not in phases or client.stage != ("scoring" if isinstance(task.work, Score) else "out"):
        return "refused", f"the task is closed: {client.stage} {client.reason}".rstrip()
    problem = _find_problem(context, state, client, task, answer)
    return ("refused", problem) if problem else ("accepted", "")


def _is_answered(context: RunContext, state: RunState, client: ClientState, answer: Answer) -> bool:
    """Whether an answer to an earlier task of this round is already known: it led to the client's current task."""
    if isinstance(answer, Refusal) and client.attempt > 0:
        return True
    scored = isinstance(answer, (Refusal, Scores)) and client.stage != "scoring" and bool(client.proposals)
    return scored and answer.task_id == name_score_task(context, state, answer.client_id)


def _find_problem(context: RunContext, state: RunState, client: ClientState, task: Task, answer: Answer) -> str:
    """What is wrong with an answer to a task; empty if it is valid."""
    match answer:
        case Update():
            limit_bytes = MAX_HEADER_BYTES + sum(blob.size_bytes for blob in task.weights)
            if answer.blob.size_bytes > limit_bytes:
                return f"the update is {answer.blob.size_bytes} bytes; the limit is {limit_bytes} bytes"
            return _find_example_problem(context, state, task, answer)
        case Scores():
            if len(answer.scores) != len(task.programs):
                count = len(task.programs)
                return f"there are {len(answer.scores)} scores, but {count} candidates were to be scored"
        case Evaluated():
            return _find_path_problem(context, task, answer) or _find_evaluation_problem(context, client, task, answer)
        case _:
            pass  # it has no figures
    return ""


def _find_example_problem(context: RunContext, state: RunState, task: Task, answer: Update) -> str:
    """What is wrong with the counts of examples: each example takes one operator of each choice, in each epoch."""
    work = task.work
    if not isinstance(work, Train) or work.paths is None:
        count = len(answer.operator_examples)
        return f"there are counts of examples for {count} choices, but no paths were drawn" if count else ""
    operators = get_network(context, state.lineages, task.architecture).network.operators_of(task.architecture)
    if {choice for choice, _ in answer.operator_examples} != operators.keys():
        return "the counts of examples must be for exactly the choices of the supernet, but they are not"
    expected = work.settings.passes_over(answer.sample_count)
    for choice, counts in answer.operator_examples:
        if not {operator for operator, _ in counts} <= set(operators[choice]):
            return f"choice {choice!r:.80} has counts of examples for operators outside the client's subspace"
        total = sum(count for _, count in counts)
        if total != expected:
            return f"{total} examples went through choice {choice!r:.80}, but {expected} were trained on"
    return ""


def _find_path_problem(context: RunContext, task: Task, answer: Evaluated) -> str:
    """What is wrong with the scores of paths; empty if they are missing as expected."""
    count = len(task.work.settings.population) if isinstance(task.work, Evaluate) else 0
    if len(answer.scores) != count:
        return f"there are scores of {len(answer.scores)} paths, but {count} were to be scored"
    shape, model = context.config.label_shape, context.config.model
    labels = math.prod((*model.input_shape, model.class_count) if shape is None else shape)
    most = answer.sample_count * labels
    if answer.label_count > most:
        return f"{answer.label_count} labels were counted, but {answer.sample_count} samples have at most {most}"
    return ""


def _find_evaluation_problem(context: RunContext, client: ClientState, task: Task, answer: Evaluated) -> str:
    """What is impossible in an evaluation; empty if it is valid."""
    if answer.sample_count > client.offer.sample_count:
        return f"{answer.sample_count} samples were evaluated, but the client's profile has {client.offer.sample_count}"
    classes, counted = context.config.model.class_count, len(answer.class_counts)
    per_class = isinstance(task.work, Evaluate) and task.work.settings.per_class
    if counted and (not per_class or counted != classes):
        requested = "each" if per_class else "none"
        return f"{counted} classes were counted, but the model has {classes} and was asked for {requested}"
    return (
        "" if answer.scores else find_contradiction(context.config.training.objective.kind, sum_totals(answer), classes)
    )


def build_skip_notice(client: ClientState | None) -> tuple[Reply, ...]:
    """Tells a client why it was skipped; nothing if it takes part, or has sent no telemetry."""
    if client is None or client.stage != "skipped" or not client.offer.telemetry_id:
        return ()
    return (_notify(client.client_id, client.offer.telemetry_id, client.reason),)


def build_idle_notice(state: RunState, client_id: str) -> tuple[Reply, ...]:
    """Tells a client why it is idle; nothing if it is not."""
    found = ((names.get(client_id), reason) for reason, names in state.idle.items())
    return tuple(_notify(client_id, telemetry_id, reason) for telemetry_id, reason in found if telemetry_id)


def list_idle_notices(state: RunState, told: Container[str] = ()) -> Iterator[Reply]:
    """Tells clients why they are idle, except those that were told before."""
    for reason, names in state.idle.items():
        for name, telemetry_id in names.items():
            if telemetry_id and name not in told:
                yield _notify(name, telemetry_id, reason)


def _notify(client_id: str, telemetry_id: str, reason: str) -> Reply:
    ack = Ack(of=telemetry_id, status="accepted", reason=reason, message_id=f"skipped/{telemetry_id}")
    return Reply(client_id=client_id, ack=ack)


def list_skip_notices(before: RunState, after: RunState) -> tuple[Reply, ...]:
    """Tells clients that a step has skipped."""
    if after.clients is before.clients:
        return ()
    new = (client for name, client in after.clients.items() if client is not before.clients.get(name))
    notices = [notice for client in new for notice in build_skip_notice(client)]
    if after.idle is not before.idle:
        told = {name for name, client in before.clients.items() if client.stage == "skipped"}
        notices += list_idle_notices(after, told)
    return tuple(notices)
