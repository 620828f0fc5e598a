"""What a message of a device deserves, and what a device is told that gets no task. Pure."""

import math
from typing import Literal

from subfleet.protocol.evaluating import totals_of
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import ArchitectureProblem, Deployed, Evaluated, Receipt, Refusal, Scores, Update
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train, Work
from subfleet.protocol.task_kinds import oddity
from subfleet.rounds.actions import Reply
from subfleet.rounds.networks import declared_of
from subfleet.rounds.progress import PhaseName
from subfleet.rounds.state import RunState, Seat, Stage
from subfleet.rounds.tasks import score_task_id
from subfleet.rounds.terms import Terms

__all__ = ["Verdict", "judge", "reply", "skip_notice", "skip_notices"]

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
    """A receipt for a message; its own id follows from it, as nothing here is drawn."""
    own_id = f"receipt/{message_id}"
    receipt = Receipt(of=message_id, status=status, reason=reason, message_id=own_id, problem=problem)
    return Reply(client_id=client_id, receipt=receipt)


def judge(terms: Terms, state: RunState, answer: _Answer) -> tuple[Verdict, str]:
    """Whether an answer to a task counts, was counted before, or is refused and why."""
    if answer.run_id != terms.run_id:
        return "refused", f"run {answer.run_id!r:.80} is not the current run {terms.run_id!r}"
    if answer.task_id in state.settled:
        return "duplicate", ""
    seat = state.seats.get(answer.client_id)
    if seat is None or (not isinstance(answer, Deployed) and answer.round != state.round):
        return "refused", f"task {answer.task_id!r:.120} is closed; the run is in round {state.round}"
    if not _is_for(seat, answer):
        return _judge_other_task(terms, state, seat, answer)
    return _judge_stage(terms, state, seat, answer)


def _is_for(seat: Seat, answer: _Answer) -> bool:
    return seat.task is not None and seat.task.task_id == answer.task_id


def _judge_other_task(terms: Terms, state: RunState, seat: Seat, answer: _Answer) -> tuple[Verdict, str]:
    """An answer to an earlier task of this round: its refusal, or its scores, are why there is a newer one."""
    if isinstance(answer, Refusal) and seat.attempt > 0:
        return "duplicate", ""
    if isinstance(answer, (Refusal, Scores)) and seat.stage != "scoring" and seat.proposals:
        was_scored = answer.task_id == score_task_id(terms, state, answer.client_id)
        return ("duplicate", "") if was_scored else _not_the_last(answer)
    return _not_the_last(answer)


def _not_the_last(answer: _Answer) -> tuple[Verdict, str]:
    return "refused", f"task {answer.task_id!r:.120} is not the one that {answer.client_id} was given last"


def _judge_stage(terms: Terms, state: RunState, seat: Seat, answer: _Answer) -> tuple[Verdict, str]:
    if seat.task is None or not _answers(seat.task.work, answer):
        return "refused", f"a message of kind {answer.KIND!r} is no answer to that task"
    if seat.stage == ("refused" if isinstance(answer, Refusal) else "done"):
        return "duplicate", ""
    phases, stage = _awaited(seat.task.work)
    if state.phase not in phases or seat.stage != stage:
        return "refused", f"the task is closed: {seat.stage} {seat.reason}".rstrip()
    odd = _odd(terms, state, seat, seat.task, answer)
    return ("refused", odd) if odd else ("accepted", "")


def _odd(terms: Terms, state: RunState, seat: Seat, task: Task, answer: _Answer) -> str:
    """What is wrong with an answer to a task; nothing where it may be believed so far."""
    match answer:
        case Update():
            limit_bytes = MAX_HEADER_BYTES + sum(blob.size_bytes for blob in task.weights)
            if answer.blob.size_bytes > limit_bytes:
                return f"the update is {answer.blob.size_bytes} bytes, but may be {limit_bytes} at most"
            return _odd_examples(terms, state, task, answer)
        case Scores():
            if len(answer.scores) != len(task.programs):
                asked = len(task.programs)
                return f"there are {len(answer.scores)} scores, but {asked} candidates were to be scored"
        case Evaluated():
            return _odd_scores(terms, task, answer) or _odd_evaluation(terms, seat, task, answer)
        case _:
            pass  # nothing of them is counted
    return ""


def _odd_examples(terms: Terms, state: RunState, task: Task, answer: Update) -> str:
    """What counts of examples say that cannot be: each went through one operator of each choice, in each epoch."""
    work = task.work
    if not isinstance(work, Train) or work.paths is None:
        return f"examples of {len(answer.operator_examples)} choices are told, but no paths were drawn" * bool(
            answer.operator_examples
        )
    kept = declared_of(terms, state.lineages, task.spec).network.operators_of(task.spec)
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


def _odd_scores(terms: Terms, task: Task, answer: Evaluated) -> str:
    """What is wrong with the scores of paths; nothing where none were asked for, and none are told."""
    asked = len(task.work.settings.population) if isinstance(task.work, Evaluate) else 0
    if len(answer.scores) != asked:
        return f"there are scores of {len(answer.scores)} paths, but {asked} were to be scored"
    most = answer.sample_count * _labels(terms)
    if answer.label_count > most:
        return f"{answer.label_count} labels were counted, but {answer.sample_count} samples have {most} at most"
    return ""


def _labels(terms: Terms) -> int:
    """Of one sample, at most."""
    shape, model = terms.config.label_shape, terms.config.model
    return math.prod((*model.input_shape, model.class_count) if shape is None else shape)


def _odd_evaluation(terms: Terms, seat: Seat, task: Task, answer: Evaluated) -> str:
    """What an evaluation says that cannot be; nothing where all can."""
    if answer.sample_count > seat.offer.sample_count:
        return f"{answer.sample_count} samples were evaluated, but the client's profile has {seat.offer.sample_count}"
    classes, counted = terms.config.model.class_count, len(answer.class_counts)
    kind = terms.config.training.objective.kind
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
    """The phases of the run and the stage of the seat in which such a task is answered."""
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


def skip_notice(seat: Seat | None) -> tuple[Reply, ...]:
    """What the client of a seat is told of it; nothing where it takes part or has told nothing."""
    if seat is None or seat.stage != "skipped" or not seat.offer.telemetry_id:
        return ()
    receipt = Receipt(
        of=seat.offer.telemetry_id,
        status="accepted",
        reason=seat.reason,
        message_id=f"skipped/{seat.offer.telemetry_id}",
    )
    return (Reply(client_id=seat.client_id, receipt=receipt),)


def skip_notices(before: RunState, after: RunState) -> tuple[Reply, ...]:
    """What clients are told whose seats a step has skipped."""
    if after.seats is before.seats:
        return ()
    new = (seat for name, seat in after.seats.items() if seat is not before.seats.get(name))
    return tuple(notice for seat in new for notice in skip_notice(seat))
