"""The evaluation after a round, by devices on held-out data of their own. Pure.

    aggregate --> evaluate   an evaluation is due, and a present client has held-out data
    evaluate  --> waiting    all awaited clients have answered, quorum, or deadline

Client states have the stages of the deploy phase: preparing, out, done; or refused, skipped, missing. Each client
evaluates the submodel that it would be deployed. A few clients get their tasks in each step.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from subfleet.protocol.messages import Evaluated
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.awaiting import close_phase, collect, drop_departed, find_sent_s, get_limit_s, record_answer
from subfleet.rounds.context import RunContext
from subfleet.rounds.continuing import is_over
from subfleet.rounds.live import Duty
from subfleet.rounds.members import list_expected
from subfleet.rounds.networks import find_standing
from subfleet.rounds.obstacles import explain_disk, get_operators, plan_bytes
from subfleet.rounds.progress import Evaluating, Waiting
from subfleet.rounds.signals import ClientOutcome, CloseEvaluation, GoOn, Outcome, SendTask
from subfleet.rounds.state import ClientState, LastEvaluation, RunState, Submodel
from subfleet.rounds.tasks import build_evaluate_task, request_tasks
from subfleet.rounds.work import PreparedTask

AT_ONCE = 8
"""Clients that evaluations are requested for in one step."""


def begin_evaluation(context: RunContext, state: RunState, now_s: float) -> RunState:
    """Begin an evaluation after a closed round, if it is due and a client can evaluate."""
    last_round = state.aggregated_round if is_over(context, state) else context.config.total_rounds
    due = context.config.evaluation.due(state.aggregated_round, last_round)
    if not due or next(_list_evaluators(context, state, now_s), None) is None:
        return state
    return replace(state, clients=MappingProxyType({})).enter(Evaluating(), now_s)


def advance_evaluation(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Request the evaluations of the next few clients, and end the phase when it waits for no client."""
    late = now_s - state.live.entered_s >= get_limit_s(context, "evaluation")
    names = [] if late else list(islice(_list_evaluators(context, state, now_s), AT_ONCE + 1))
    if names:
        new = {name: _build_client(context, state, name) for name in names[:AT_ONCE]}
        state = replace(state, clients=MappingProxyType({**state.clients, **new}))
        more = (GoOn(),) if len(names) > AT_ONCE else ()
        return state, (*request_tasks(state, new.values()), *more)
    state, parted = drop_departed(context, state, now_s)
    collection = collect(context, state, "evaluation", now_s)
    if not collection.closes:
        return state, parted
    state, withdrawn = close_phase(context, state, "evaluation", collection, now_s)
    state, close = _close_evaluation(state, now_s)
    return state, (*parted, close, *withdrawn)


def send_evaluation(
    context: RunContext, state: RunState, client: ClientState, made: PreparedTask, now_s: float
) -> ClientOutcome:
    """Send an evaluate task, if its program fits the client's budget of its last round."""
    budget_bytes = client.offer.budget.memory_bytes
    operators = get_operators(state, client.client_id)
    planned_bytes = plan_bytes(client, made.facts, operators, lambda room: room.evaluation_peak_bytes)
    if planned_bytes is None:
        reason = f"its runtime {client.offer.runtime!r} lacks an operator of its submodel"
    elif planned_bytes > budget_bytes:
        reason = f"the evaluation needs {planned_bytes} bytes of memory and the budget is {budget_bytes}"
    else:
        task = build_evaluate_task(context, state, client, made, planned_bytes, now_s)
        reason = explain_disk(client, task)
        if not reason:
            return replace(client, stage="out", task=task), (SendTask(task=task),)
    return replace(client, stage="skipped", reason=reason), ()


def record_evaluation(
    context: RunContext, state: RunState, client: ClientState, answer: Evaluated, now_s: float
) -> tuple[RunState, ClientState]:
    """Record the evaluation of a model or of paths by a device."""
    duty: Duty = "paths" if state.phase == "search" else "evaluation"
    state = record_answer(state, answer.client_id, duty, now_s - find_sent_s(context, state, client, duty))
    return state, replace(client, stage="done", evaluated=answer)


def _close_evaluation(state: RunState, now_s: float) -> tuple[RunState, CloseEvaluation]:
    """Close the evaluation."""
    clients = MappingProxyType(dict(sorted(state.clients.items())))
    done = [client for client in clients.values() if client.stage == "done"]
    answers = ((client.client_id, client.evaluated) for client in done)
    last = {name: LastEvaluation(round=state.round, evaluated=one) for name, one in answers if one is not None}
    close = CloseEvaluation(
        round=state.round,
        seconds=now_s - state.live.entered_s,
        clients=tuple(clients.values()),
        lineages=state.lineages,
    )
    state = replace(
        state,
        clients=MappingProxyType({}),
        evaluated=MappingProxyType({**state.evaluated, **last}),
        settled=state.settled.union(client.task.task_id for client in done if client.task is not None),
    )
    return state.enter(Waiting(), now_s), close


def _list_evaluators(context: RunContext, state: RunState, now_s: float) -> Iterator[str]:
    """The ids of the expected clients with a model and held-out data that have no task yet, sorted."""
    expected = list_expected(context, state, now_s)
    for name in sorted(name for name in expected if name in state.last and name not in state.clients):
        profile = state.profiles.get(name)
        has_data = profile is not None and profile.held_out_count > 0
        if has_data and find_standing(context, state, state.last[name]) is not None:
            yield name


def _build_client(context: RunContext, state: RunState, name: str) -> ClientState:
    last = state.last[name]
    client = find_standing(context, state, last)
    if client is None:
        raise ValueError(f"client {name} has no model to evaluate")
    return build_evaluator(state, name, client.size, client.architecture, class_counts=last.offer.class_counts)


def build_evaluator(
    state: RunState, name: str, size: Architecture, architecture: Architecture, class_counts: tuple[int, ...] = ()
) -> ClientState:
    """The state of a client that evaluates a submodel, with the budget of its last round.

    Raises:
        ValueError: the client has no profile.
    """
    last, profile = state.last[name], state.profiles.get(name)
    if profile is None:
        raise ValueError(f"client {name} has no profile")
    held_out = profile.held_out_count
    return ClientState(
        client_id=name,
        device=last.device,
        stage="preparing",
        offer=replace(last.offer, sample_count=held_out, class_counts=class_counts, telemetry_id="", data_warning=""),
        given=Submodel(size=size, architecture=architecture),
    )
