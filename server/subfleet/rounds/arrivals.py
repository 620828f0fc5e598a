"""Applies the results and failures of requested work to the state. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Update
from subfleet.rounds import work
from subfleet.rounds.assigning import find_lasting, request_task, send_training
from subfleet.rounds.awaiting import find_sent_s, record_answer
from subfleet.rounds.closing import finish_aggregation, retry_aggregation
from subfleet.rounds.context import RunContext
from subfleet.rounds.evaluating import send_evaluation
from subfleet.rounds.judging import judge, reply
from subfleet.rounds.networks import begin_with, build_target_estimates, get_estimates, has_estimates
from subfleet.rounds.obstacles import select_models
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.searching import fail_generation, receive_generation
from subfleet.rounds.signals import AggregationRequest, Outcome, RequestDone, RequestFailed, SendTask, Withdraw
from subfleet.rounds.sizing import list_lacking, request_new, send_scoring
from subfleet.rounds.state import AcceptedUpdate, ClientState, Lasts, RunState
from subfleet.rounds.tasks import build_deploy_task
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram


def apply_result(  # noqa: C901, PLR0912 - a case for each request
    context: RunContext, state: RunState, event: RequestDone, now_s: float
) -> Outcome:
    """Apply the result of a request; an obsolete one changes nothing."""
    request, result = event.request, event.result
    match request:
        case work.TaskRequest():
            outcome = _receive_task(context, state, request, result, now_s)
        case work.ScoringRequest():
            outcome = _receive_candidates(context, state, request, result, now_s)
        case work.EvaluationRequest():
            outcome = send_evaluation(context, state, request, result, now_s)
        case work.ModelsRequest():
            outcome = _receive_models(context, state, request, result, now_s)
        case work.ProgramRequest():
            outcome = _receive_program(context, state, request, result), ()
        case work.CostRequest():
            outcome = _receive_estimates(context, state, request, result)
        case work.SearchRequest():
            outcome = _receive_search(context, state, request, result)
        case work.NetworksRequest():
            outcome = begin_with(context, state, request, result), ()
        case work.GenerationRequest():
            outcome = receive_generation(context, state, request, result, now_s)
        case work.CheckRequest():
            outcome = _settle_update(context, state, request.update, now_s, result)
        case AggregationRequest():
            outcome = finish_aggregation(context, state, request, result, now_s)
        case _:
            never(request)
    return outcome


def apply_failure(  # noqa: C901, PLR0912 - a case for each request
    context: RunContext, state: RunState, event: RequestFailed, now_s: float
) -> Outcome:
    """Go on without the result of a request."""
    request, reason = event.request, event.reason
    match request:
        case work.TaskRequest():
            client = state.find_client(request, "preparing", "train")
            known = client is not None and client.attempt == request.attempt
            outcome: Outcome = _skip_client(context, state, client if known else None, reason), ()
        case work.EvaluationRequest():
            client = state.find_client(request, "preparing", "evaluate", "search")
            outcome = _skip_client(context, state, client, reason), ()
        case work.ModelsRequest():
            client = state.find_client(request, "preparing", "deploy")
            outcome = _skip_client(context, state, client, reason), ()
        case work.ScoringRequest():
            outcome = _receive_candidates(context, state, request, (), now_s)
        case work.ProgramRequest():
            outcome = _receive_program(context, state, request, ProgramFacts(problem=reason)), ()
        case work.CostRequest():
            outcome = _receive_estimates(context, state, request, None, reason)
        case work.SearchRequest():
            outcome = _skip_unsearched(state, request, reason), ()
        case work.NetworksRequest():
            outcome = begin_with(context, state, request, ()), ()
        case work.GenerationRequest():
            outcome = fail_generation(state, request, reason, now_s), ()
        case work.CheckRequest():
            outcome = _settle_update(context, state, request.update, now_s, None, reason)
        case AggregationRequest():
            outcome = retry_aggregation(context, state, request, reason, now_s)
        case _:
            never(request)
    return outcome


def request_tasks(state: RunState) -> tuple[work.TaskRequest, ...]:
    """Request the tasks that were not sent yet."""
    clients = (client for _, client in sorted(state.clients.items()) if client.stage == "preparing")
    requests = (request_task(state, client) for client in clients)
    return tuple(request for request in requests if request is not None)


def _receive_task(
    context: RunContext, state: RunState, request: work.TaskRequest, made: work.PreparedTask, now_s: float
) -> Outcome:
    client = state.find_client(request, "preparing", "train")
    if client is None or client.size is None:
        return state, ()
    if (client.attempt, client.size.architecture_id) != (request.attempt, request.participant.size.architecture_id):
        return state, ()
    if list_lacking(context, state):  # a smaller size cannot be chosen yet; the task is requested again later
        return state, ()
    state = _remember_program(context, state, client, made.facts)
    client, actions = send_training(context, state, client, made, now_s)
    return state.with_clients(client), actions


def _remember_program(context: RunContext, state: RunState, client: ClientState, facts: ProgramFacts) -> RunState:
    """The state that knows a client's training program; unchanged in other phases."""
    if client.given is None or state.phase != "train":
        return state
    program = SizedProgram(size=client.given.size, target=client.offer.runtime, student=client.given.student)
    return state if program.key in state.written else _add_program(context, state, program, facts)


def _add_program(context: RunContext, state: RunState, program: SizedProgram, facts: ProgramFacts) -> RunState:
    """The state that knows one more written program; the first facts stay."""
    one = WrittenProgram(program=program, facts=facts, run_attempt=state.run_attempt)
    written = MappingProxyType({program.key: one, **state.written})
    live = state.live
    if context.roles.assigner.search is not None and has_estimates(context, state, program.target):
        estimate = get_estimates(context, state, program.target)(program.size)  # each choice needs all of them
        live = replace(live, written_estimates=MappingProxyType({**live.written_estimates, program.key: estimate}))
    return replace(state, written=written, live=live)


def _skip_client(context: RunContext, state: RunState, client: ClientState | None, reason: str) -> RunState:
    """Skip a client with a task or models that cannot be made."""
    if client is None:
        return state
    state = _remember_program(context, state, client, ProgramFacts(problem=reason))
    lasts: Lasts = find_lasting(context, state, client) if state.phase == "train" else "passing"
    return state.with_clients(replace(client, stage="skipped", reason=reason, lasts=lasts))


def _receive_candidates(
    context: RunContext,
    state: RunState,
    request: work.ScoringRequest,
    candidates: Sequence[work.Scorable],
    now_s: float,
) -> Outcome:
    client = state.find_client(request, "scoring", "train")
    if client is None or client.task is not None:
        return state, ()
    client, actions = send_scoring(context, state, client, candidates, now_s)
    return state.with_clients(client), actions


def _receive_models(
    context: RunContext, state: RunState, request: work.ModelsRequest, made: work.ExportedModels, now_s: float
) -> Outcome:
    client = state.find_client(request, "preparing", "deploy")
    if client is None:
        return state, ()
    programs = select_models(client, made.programs)
    if not programs:
        disk_bytes = client.offer.budget.disk_bytes if client.offer.budget else 0
        reason = f"none of its models fits twice on the {disk_bytes} bytes of its disk"
        return state.with_clients(replace(client, stage="skipped", reason=reason)), ()
    task, targets = build_deploy_task(context, state, client, programs, now_s), {one.target for one in programs}
    models = tuple(model for model in made.models if model.target in targets)
    return state.with_clients(replace(client, stage="out", task=task, models=models)), (SendTask(task=task),)


def _receive_program(
    context: RunContext, state: RunState, request: work.ProgramRequest, facts: ProgramFacts
) -> RunState:
    """Take a program for later rounds out of the queue; it is known as untrainable if it could not be written."""
    if request.program not in state.queue:
        return state
    state = replace(state, queue=tuple(one for one in state.queue if one != request.program))
    return _add_program(context, state, request.program, facts)


def _receive_estimates(
    context: RunContext, state: RunState, request: work.CostRequest, memory: MemoryEstimates | None, problem: str = ""
) -> Outcome:
    """Remember the estimates of a target; the first ones stay."""
    estimates = build_target_estimates(context, request, memory, problem)
    known = MappingProxyType({request.key: estimates, **state.live.estimates})
    state = state.without_request(request)
    return _request_next(context, replace(state, live=replace(state.live, estimates=known)))


def _receive_search(
    context: RunContext, state: RunState, request: work.SearchRequest, made: work.SearchResult
) -> Outcome:
    state = state.without_request(request)
    if request.run_attempt != state.run_attempt:
        return state, ()
    if state.explored_attempt != state.run_attempt:
        pool = tuple(dict.fromkeys((*state.pool, *made.sizes)))
        state = replace(state, pool=pool, explored_attempt=state.run_attempt)
    written = MappingProxyType({**state.live.written_estimates, **made.written_estimates})
    live = replace(state.live, searches=made.searches, written_estimates=written)
    return _request_next(context, replace(state, live=live))


def _skip_unsearched(state: RunState, request: work.SearchRequest, reason: str) -> RunState:
    """Skip the clients without a task after a failed search; no smaller size could be chosen for them either."""
    state = state.without_request(request)
    if request.run_attempt != state.run_attempt:
        return state
    waiting = (client for client in state.clients.values() if client.stage in ("answered", "preparing"))
    return state.with_clients(*(replace(client, stage="skipped", reason=reason) for client in waiting))


def _request_next(context: RunContext, state: RunState) -> Outcome:
    """Make the next requests; if none is needed, request tasks that were requested before a restart."""
    if state.phase != "train":
        return state, ()
    wanted = list_lacking(context, state)
    return request_new(state, wanted) if wanted else (state, request_tasks(state))


def _settle_update(
    context: RunContext, state: RunState, update: Update, now_s: float, change: ChangeSize | None, why: str = ""
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
        took_s = max(0.0, now_s - find_sent_s(context, state, client, "training"))
        state = record_answer(state, update.client_id, "training", took_s)
        client = replace(client, stage="done", trained=AcceptedUpdate(update=update, change=change, took_s=took_s))
        answer = reply(update.client_id, update.message_id, "accepted", reason)
    return state.with_clients(client), (answer, Withdraw(task_id=update.task_id))
