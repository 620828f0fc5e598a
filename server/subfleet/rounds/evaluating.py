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

from subfleet.protocol.submodel import Architecture
from subfleet.rounds.awaiting import close_phase, collect, drop_departed, get_limit_s
from subfleet.rounds.context import RunContext
from subfleet.rounds.members import list_expected
from subfleet.rounds.networks import find_standing
from subfleet.rounds.obstacles import explain_disk, get_operators, plan_bytes
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import ClientOutcome, CloseEvaluation, GoOn, Outcome, SendTask
from subfleet.rounds.state import ClientState, RunState, Submodel
from subfleet.rounds.tasks import build_evaluate_task, request_tasks
from subfleet.rounds.work import PreparedTask

AT_ONCE = 8
"""Clients that evaluations are requested for in one step."""


def advance_evaluation(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Request the evaluations of the next few clients, and end the phase when it waits for no client."""
    late = now_s - state.live.entered_s >= get_limit_s(context, "evaluation")
    new = [] if late else list(islice(list_evaluators(context, state, now_s), AT_ONCE + 1))
    if new:
        more = (GoOn(),) if len(new) > AT_ONCE else ()
        return state.with_clients(*new[:AT_ONCE]), (*request_tasks(state, new[:AT_ONCE]), *more)
    state, parted = drop_departed(context, state, now_s)
    collection = collect(context, state, "evaluation", now_s)
    if not collection.closes:
        return state, parted
    state, withdrawn = close_phase(context, state, "evaluation", collection, now_s)
    clients = tuple(client for _, client in sorted(state.clients.items()))
    answers = {client.client_id: client.evaluated for client in clients if client.stage == "done" and client.evaluated}
    close = CloseEvaluation(
        round=state.round, seconds=now_s - state.live.entered_s, clients=clients, lineages=state.lineages
    )
    state = replace(
        state,
        clients=MappingProxyType({}),
        evaluated=MappingProxyType({**state.evaluated, **answers}),
        settled=state.settled.union(answer.task_id for answer in answers.values()),
    )
    return state.enter(Waiting(), now_s), (*parted, close, *withdrawn)


def send_evaluation(
    context: RunContext, state: RunState, client: ClientState, prepared: PreparedTask, now_s: float
) -> ClientOutcome:
    """Send an evaluate task, if its program fits the client's budget of its last round."""
    budget_bytes = client.offer.budget.memory_bytes
    operators = get_operators(state, client.client_id)
    planned_bytes = plan_bytes(client, prepared.facts, operators, lambda room: room.evaluation_peak_bytes)
    if planned_bytes is None:
        reason = f"its runtime {client.offer.runtime!r} lacks an operator of its submodel"
    elif planned_bytes > budget_bytes:
        reason = f"the evaluation needs {planned_bytes} bytes of memory and the budget is {budget_bytes}"
    else:
        task = build_evaluate_task(context, state, client, prepared, planned_bytes, now_s)
        reason = explain_disk(client, task)
        if not reason:
            return replace(client, stage="out", task=task), (SendTask(task=task),)
    return replace(client, stage="skipped", reason=reason), ()


def list_evaluators(context: RunContext, state: RunState, now_s: float) -> Iterator[ClientState]:
    """The states of the expected clients with a model and held-out data that have no task yet, by their ids."""
    expected = list_expected(context, state, now_s)
    for name in sorted(name for name in expected if name in state.last and name not in state.clients):
        last = state.last[name]
        if state.profiles[name].held_out_count and (client := find_standing(context, state, last)) is not None:
            yield build_evaluator(state, name, client.size, client.architecture, last.offer.class_counts)


def build_evaluator(
    state: RunState, name: str, size: Architecture, architecture: Architecture, class_counts: tuple[int, ...] = ()
) -> ClientState:
    """The state of a client that evaluates a submodel, with the budget of its last round."""
    last, held_out = state.last[name], state.profiles[name].held_out_count
    return ClientState(
        client_id=name,
        device=last.device,
        stage="preparing",
        offer=replace(last.offer, sample_count=held_out, class_counts=class_counts, telemetry_id="", data_warning=""),
        given=Submodel(size=size, architecture=architecture),
    )
