"""After a round: devices say how good the model is on data of their own that it was not trained on. Pure.

    fold     --> evaluate   it is due, and somebody who is there has held-out data
    evaluate --> waiting    all that are waited for have answered, quorum, or deadline

A seat goes as in the deploy phase: preparing, out, done; or refused, skipped, missing. Each client evaluates the subnet
that it would be given for good, so that what it says is what it would have of it. A few are asked in each step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from subfleet.protocol.messages import Evaluated
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.actions import Action, CloseEvaluation, GoOn, SendTask
from subfleet.rounds.awaiting import collected, limit_s, sent_s, with_answer, with_phase_closed, without_parted
from subfleet.rounds.continuing import over
from subfleet.rounds.fitting import beyond_disk, operators_of, planned_evaluation
from subfleet.rounds.live import Duty
from subfleet.rounds.members import expected
from subfleet.rounds.networks import standing_for
from subfleet.rounds.progress import Evaluating, Waiting
from subfleet.rounds.state import LastEvaluation, RunState, Seat, Submodel
from subfleet.rounds.tasks import evaluate_task
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import EvaluationRequest, PreparedTask

__all__ = ["begun", "evaluated", "evaluating", "evaluating_seat", "evaluation_made", "evaluations_wanted"]

AT_ONCE = 8
"""Clients that are asked in one step."""

Outcome = tuple[RunState, tuple[Action, ...]]


def begun(terms: Terms, state: RunState, now_s: float) -> RunState:
    """The state after a round was closed: in this phase, where it is due and there is anyone to ask."""
    last_round = state.folded_round if over(terms, state) else terms.config.total_rounds
    due = terms.config.evaluation.due(state.folded_round, last_round)
    if not due or next(_to_ask(terms, state, now_s), None) is None:
        return state
    return replace(state, seats=MappingProxyType({})).entered(Evaluating(), now_s)


def evaluating(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Ask the next few, and end the phase where nothing more is to be waited for."""
    late = now_s - state.live.entered_s >= limit_s(terms, "evaluation")
    names = [] if late else list(islice(_to_ask(terms, state, now_s), AT_ONCE + 1))
    if names:
        new = {name: _seat(terms, state, name) for name in names[:AT_ONCE]}
        state = replace(state, seats=MappingProxyType({**state.seats, **new}))
        more = (GoOn(),) if len(names) > AT_ONCE else ()
        return state, (*evaluations_wanted(state, new), *more)
    state, parted = without_parted(terms, state, now_s)
    collection = collected(terms, state, "evaluation", now_s)
    if not collection.closes:
        return state, parted
    state, withdrawn = with_phase_closed(terms, state, "evaluation", collection, now_s)
    state, close = _closed(state, now_s)
    return state, (*parted, close, *withdrawn)


def evaluations_wanted(state: RunState, names: Iterable[str]) -> tuple[EvaluationRequest, ...]:
    """What the tasks of some clients are made of."""
    seats = (state.seats[name] for name in sorted(names))
    return tuple(
        EvaluationRequest(participant=seat.participant, round=state.round, target=seat.offer.runtime)
        for seat in seats
        if seat.stage == "preparing" and seat.participant is not None
    )


def evaluation_made(
    terms: Terms, state: RunState, request: EvaluationRequest, made: PreparedTask, now_s: float
) -> Outcome:
    """Send a task, if what its program plans fits what the client had to give in its last round."""
    seat = state.seats.get(request.client_id)
    if state.phase not in ("evaluate", "search") or seat is None or seat.stage != "preparing":
        return state, ()
    if (request.round, request.participant) != (state.round, seat.participant):
        return state, ()
    budget = seat.offer.budget or Budget(memory_bytes=0)
    planned_bytes, unfit = planned_evaluation(seat, made.facts, operators_of(state, seat.client_id))
    if unfit:
        reason = f"its runtime {seat.offer.runtime!r} lacks an operator of what is to be evaluated"
        return state.with_seats(replace(seat, stage="skipped", reason=reason)), ()
    if planned_bytes > budget.memory_bytes:
        reason = f"to evaluate takes {planned_bytes} bytes of memory, but the budget is {budget.memory_bytes}"
        return state.with_seats(replace(seat, stage="skipped", reason=reason)), ()
    task = evaluate_task(terms, state, seat, made, planned_bytes, now_s)
    if reason := beyond_disk(seat, task):
        return state.with_seats(replace(seat, stage="skipped", reason=reason)), ()
    return state.with_seats(replace(seat, stage="out", task=task)), (SendTask(task=task),)


def evaluated(terms: Terms, state: RunState, seat: Seat, answer: Evaluated, now_s: float) -> tuple[RunState, Seat]:
    """What a device found, in an evaluation or of paths."""
    duty: Duty = "paths" if state.phase == "search" else "evaluation"
    state = with_answer(state, answer.client_id, duty, now_s - sent_s(terms, state, seat, duty))
    return state, replace(seat, stage="done", evaluated=answer)


def _closed(state: RunState, now_s: float) -> tuple[RunState, CloseEvaluation]:
    """The state after the evaluation."""
    seats = MappingProxyType(dict(sorted(state.seats.items())))
    done = [seat for seat in seats.values() if seat.stage == "done"]
    last = {
        seat.client_id: LastEvaluation(round=state.round, evaluated=seat.evaluated)
        for seat in done
        if seat.evaluated is not None
    }
    close = CloseEvaluation(
        round=state.round,
        seconds=now_s - state.live.entered_s,
        seats=tuple(seats.values()),
        lineages=state.lineages,
    )
    state = replace(
        state,
        seats=MappingProxyType({}),
        evaluated=MappingProxyType({**state.evaluated, **last}),
        settled=state.settled.union(seat.task.task_id for seat in done if seat.task is not None),
    )
    return state.entered(Waiting(), now_s), close


def _to_ask(terms: Terms, state: RunState, now_s: float) -> Iterator[str]:
    """Those with a model and held-out data who are there, or are waited for, and have not been asked; by their ids."""
    for name in sorted(
        name for name in expected(terms, state, now_s) if name in state.last and name not in state.seats
    ):
        profile = state.profiles.get(name)
        if profile is not None and profile.held_out_count and standing_for(terms, state, state.last[name]) is not None:
            yield name


def _seat(terms: Terms, state: RunState, name: str) -> Seat:
    last = state.last[name]
    client = standing_for(terms, state, last)
    if client is None:
        raise ValueError(f"client {name} has no model to evaluate")
    return evaluating_seat(state, name, client.size, client.spec, class_counts=last.offer.class_counts)


def evaluating_seat(
    state: RunState, name: str, size: SubnetSpec, spec: SubnetSpec, class_counts: tuple[int, ...] = ()
) -> Seat:
    """The seat of a client that is to evaluate a submodel, within what it could give when it took part last.

    Raises:
        ValueError: it has told no profile.
    """
    last, profile = state.last[name], state.profiles.get(name)
    if profile is None:
        raise ValueError(f"client {name} has told no profile")
    held_out = profile.held_out_count
    return Seat(
        client_id=name,
        device=last.device,
        stage="preparing",
        offer=replace(last.offer, sample_count=held_out, class_counts=class_counts, telemetry_id="", data_warning=""),
        given=Submodel(size=size, spec=spec),
    )
