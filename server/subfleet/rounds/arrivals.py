"""Applies the results and failures of requested work to the state. Pure."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Update
from subfleet.rounds import signals, work
from subfleet.rounds.assigning import find_lasting, send_training
from subfleet.rounds.awaiting import find_sent_s, record_answer
from subfleet.rounds.closing import finish_aggregation, retry_aggregation
from subfleet.rounds.context import RunContext
from subfleet.rounds.evaluating import send_evaluation
from subfleet.rounds.judging import judge, reply
from subfleet.rounds.live import Requested
from subfleet.rounds.networks import begin_with, build_target_estimates, get_estimates, request_estimates
from subfleet.rounds.obstacles import select_models
from subfleet.rounds.ongoing import begin_clients
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.searching import receive_generation
from subfleet.rounds.signals import Action, ClientOutcome, Outcome
from subfleet.rounds.sizing import list_lacking, request_new, send_scoring
from subfleet.rounds.state import AcceptedUpdate, ClientState, Lasts, RunState
from subfleet.rounds.tasks import build_deploy_task, request_task, request_tasks
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram


def apply_result(  # noqa: C901, PLR0912 - a case for each request
    context: RunContext, state: RunState, event: signals.RequestDone | signals.RequestFailed, now_s: float
) -> Outcome:
    """Apply the result of a request, or go on without one; an obsolete request changes nothing."""
    request = event.request
    result, problem = (event.result, "") if isinstance(event, signals.RequestDone) else (None, event.reason)
    if isinstance(request, Requested):
        state = replace(state, live=replace(state.live, requested=state.live.requested - {request}))
    outcome: Outcome = state, ()
    match request:
        case work.TaskRequest() | work.ScoringRequest() | work.EvaluationRequest() | work.ModelsRequest():
            outcome = _continue_client(context, state, request, result, problem, now_s)
        case work.ProgramRequest():
            outcome = _receive_program(context, state, request, result or ProgramFacts(problem=problem)), ()
        case work.CostRequest():
            outcome = _receive_estimates(context, state, request, result, problem)
        case work.SearchRequest():
            outcome = _receive_search(context, state, request, result, problem)
        case work.NetworksRequest():
            outcome = begin_with(context, state, request, result or ()), ()
        case work.GenerationRequest():
            outcome = receive_generation(context, state, request, result, problem, now_s)
        case work.CheckRequest():
            outcome = _settle_update(context, state, request.update, now_s, result, problem)
        case signals.AggregationRequest():
            if state.phase != "aggregate" or request.round != state.round:
                pass  # it is obsolete
            elif result is None:
                outcome = retry_aggregation(context, state, problem, now_s)
            else:
                outcome = finish_aggregation(context, state, result, now_s)
        case _:
            never(request)
    return outcome


def _continue_client(
    context: RunContext, state: RunState, request: work.ClientRequest, result: Any, problem: str, now_s: float
) -> Outcome:
    """Send a client the task that was prepared, or skip the client if the task cannot be made."""
    name = request.client_id if isinstance(request, work.ScoringRequest) else request.participant.client_id
    client, actions = state.clients.get(name), tuple[Action, ...]()
    if client is None or request != request_task(state, client):
        return state, ()
    match request:
        case work.ScoringRequest():
            client, actions = send_scoring(context, state, client, result or (), now_s)
        case _ if result is None:
            state = _remember_program(context, state, client, ProgramFacts(problem=problem))
            lasts: Lasts = find_lasting(context, state, client) if state.phase == "train" else "passing"
            client = replace(client, stage="skipped", reason=problem, lasts=lasts)
        case work.TaskRequest():
            if list_lacking(context, state):  # a smaller size cannot be chosen yet; the task is requested again later
                return state, ()
            state = _remember_program(context, state, client, result.facts)
            if context.config.asynchronous is not None:
                state = begin_clients(state, [name], now_s)
            client, actions = send_training(context, state, client, result, now_s)
        case work.EvaluationRequest():
            client, actions = send_evaluation(context, state, client, result, now_s)
        case work.ModelsRequest():
            client, actions = _send_models(context, state, client, result, now_s)
        case _:
            never(request)
    return state.with_clients(client), actions


def _remember_program(context: RunContext, state: RunState, client: ClientState, facts: ProgramFacts) -> RunState:
    """The state with a client's training program added to the written programs; unchanged in other phases."""
    if client.given is None or state.phase != "train":
        return state
    program = SizedProgram(size=client.given.size, target=client.offer.runtime, student=client.given.student)
    return _add_program(context, state, program, facts)


def _add_program(context: RunContext, state: RunState, program: SizedProgram, facts: ProgramFacts) -> RunState:
    """The state with another written program; the first facts about a program are kept."""
    if program.key in state.written:
        return state
    written = WrittenProgram(program=program, facts=facts, run_attempt=state.run_attempt)
    live = state.live
    if context.roles.assigner.search is not None and not request_estimates(context, state, program.target):
        estimate = get_estimates(context, state, program.target)(program.size)  # each choice needs all of them
        live = replace(live, written_estimates=MappingProxyType({**live.written_estimates, program.key: estimate}))
    return replace(state, written=MappingProxyType({program.key: written, **state.written}), live=live)


def _send_models(
    context: RunContext, state: RunState, client: ClientState, exported: work.ExportedModels, now_s: float
) -> ClientOutcome:
    programs = select_models(client, exported.programs)
    if not programs:
        reason = f"its disk of {client.offer.budget.disk_bytes} bytes has no room for two copies of any of its models"
        return replace(client, stage="skipped", reason=reason), ()
    task, targets = build_deploy_task(context, state, client, programs, now_s), {program.target for program in programs}
    models = tuple(model for model in exported.models if model.target in targets)
    return replace(client, stage="out", task=task, models=models), (signals.SendTask(task=task),)


def _receive_program(
    context: RunContext, state: RunState, request: work.ProgramRequest, facts: ProgramFacts
) -> RunState:
    """Remove a program for later rounds from the queue; if it could not be written, its size counts as untrainable."""
    if request.program not in state.queue:
        return state
    state = replace(state, queue=tuple(program for program in state.queue if program != request.program))
    return _add_program(context, state, request.program, facts)


def _receive_estimates(
    context: RunContext, state: RunState, request: work.CostRequest, memory: MemoryEstimates | None, problem: str
) -> Outcome:
    """Remember the estimates of a target; the first ones are kept."""
    estimates = build_target_estimates(context, request, memory, problem)
    known = MappingProxyType({request.key: estimates, **state.live.estimates})
    return _request_next(context, replace(state, live=replace(state.live, estimates=known)))


def _receive_search(
    context: RunContext, state: RunState, request: work.SearchRequest, result: work.SearchResult | None, problem: str
) -> Outcome:
    """Remember the sizes that a search has found; after a failed search, skip the clients without a task."""
    if request.run_attempt != state.run_attempt:
        return state, ()
    if result is None:  # no smaller size could be chosen for them either
        waiting = (
            client
            for client in state.clients.values()
            if client.stage in ("answered", "preparing") or (client.stage == "scoring" and client.task is None)
        )
        return state.with_clients(*(replace(client, stage="skipped", reason=problem) for client in waiting)), ()
    if state.explored_attempt != state.run_attempt:
        pool = tuple(dict.fromkeys((*state.pool, *result.sizes)))
        state = replace(state, pool=pool, explored_attempt=state.run_attempt)
    written = MappingProxyType({**state.live.written_estimates, **result.written_estimates})
    live = replace(state.live, searches=result.searches, written_estimates=written)
    return _request_next(context, replace(state, live=live))


def _request_next(context: RunContext, state: RunState) -> Outcome:
    """Make the next requests; if none is needed, request tasks that were requested before a restart."""
    if state.phase != "train":
        return state, ()
    lacking = list_lacking(context, state)
    return request_new(state, lacking) if lacking else (state, request_tasks(state, state.clients.values()))


def _settle_update(
    context: RunContext, state: RunState, update: Update, now_s: float, change: ChangeSize | None, why: str
) -> Outcome:
    """Accept an update that is on disk and checked, or refuse one with an invalid blob."""
    verdict, reason = judge(context, state, update)
    if verdict != "accepted":
        return state, (reply(update.client_id, update.message_id, verdict, reason),)
    client = state.clients[update.client_id]
    if change is None:
        client = replace(client, stage="refused", reason=why, lasts="lasting", outlier=why)
        answer = reply(update.client_id, update.message_id, "refused", why)
    else:
        state = record_answer(context, state, client, "training", now_s)
        took_s = max(0.0, now_s - find_sent_s(context, state, client, "training"))
        client = replace(client, stage="done", trained=AcceptedUpdate(update=update, change=change, took_s=took_s))
        answer = reply(update.client_id, update.message_id, "accepted", reason)
    return state.with_clients(client), (answer, signals.Withdraw(task_id=update.task_id))
