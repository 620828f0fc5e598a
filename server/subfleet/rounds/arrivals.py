"""What follows when work beside the loop is done, or has failed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Update
from subfleet.rounds.assigning import lasting_of, prepared_client, task_wanted
from subfleet.rounds.awaiting import sent_s, with_answer
from subfleet.rounds.closing import aggregated, not_aggregated
from subfleet.rounds.context import RunContext
from subfleet.rounds.estimation import estimates_of, has_estimates, target_estimates
from subfleet.rounds.evaluating import evaluation_made
from subfleet.rounds.judging import judge, reply
from subfleet.rounds.live import TargetEstimates
from subfleet.rounds.networks import begun_with
from subfleet.rounds.obstacles import models_with_room
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.searching import generation_failed, generation_made
from subfleet.rounds.signals import AggregationRequest, Done, Failed, Outcome, SendTask, Withdraw
from subfleet.rounds.sizing import asking, lacking, scoring_client
from subfleet.rounds.state import ClientState, Lasts, RunState, Trained
from subfleet.rounds.tasks import deploy_task
from subfleet.rounds.work import (
    CheckRequest,
    CostRequest,
    EvaluationRequest,
    ExportedModels,
    GenerationRequest,
    ModelsRequest,
    NetworksRequest,
    PreparedTask,
    ProgramRequest,
    Scorable,
    ScoringRequest,
    SearchRequest,
    SearchResult,
    TaskRequest,
)
from subfleet.search.candidates import Candidate
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram


def with_result(  # noqa: C901, PLR0912 - a case for each request
    context: RunContext, state: RunState, event: Done, now_s: float
) -> Outcome:
    """Take in the result of a request; one that nobody waits for any more changes nothing."""
    request, result = event.request, event.result
    match request:
        case TaskRequest():
            outcome = _task(context, state, request, result, now_s)
        case ScoringRequest():
            outcome = _scoring(context, state, request, result, now_s)
        case EvaluationRequest():
            outcome = evaluation_made(context, state, request, result, now_s)
        case ModelsRequest():
            outcome = _models(context, state, request, result, now_s)
        case ProgramRequest():
            outcome = _program(context, state, request, result), ()
        case CostRequest():
            outcome = _with_estimates(context, state, request, target_estimates(context, request, result))
        case SearchRequest():
            outcome = _explored(context, state, request, result)
        case NetworksRequest():
            outcome = begun_with(context, state, request, result), ()
        case GenerationRequest():
            outcome = generation_made(context, state, request, result, now_s)
        case CheckRequest():
            outcome = _update(context, state, request.update, result, now_s)
        case AggregationRequest():
            outcome = aggregated(context, state, request, result, now_s)
        case _:
            never(request)
    return outcome


def with_failure(  # noqa: C901, PLR0912 - a case for each request
    context: RunContext, state: RunState, event: Failed, now_s: float
) -> Outcome:
    """Go on without the result of a request."""
    request, reason = event.request, event.reason
    match request:
        case TaskRequest():
            client = state.clients.get(request.client_id) if state.phase == "train" else None
            known = client is not None and (state.round, client.attempt) == (request.round, request.attempt)
            outcome: Outcome = _without(context, state, client if known else None, reason), ()
        case EvaluationRequest() | ModelsRequest():
            # What fails late may be of another phase, in which the client has another client state.
            phases = ("evaluate", "search") if isinstance(request, EvaluationRequest) else ("deploy",)
            known = state.phase in phases and state.round == request.round
            client = state.clients.get(request.client_id) if known else None
            outcome = _without(context, state, client, reason), ()
        case ScoringRequest():
            outcome = _scoring(context, state, request, (), now_s)
        case ProgramRequest():
            outcome = _program(context, state, request, ProgramFacts.untrainable(reason)), ()
        case CostRequest():
            outcome = _with_estimates(context, state, request, target_estimates(context, request, None, reason))
        case SearchRequest():
            outcome = _unexplored(state, request, reason), ()
        case NetworksRequest():
            outcome = begun_with(context, state, request, ()), ()
        case GenerationRequest():
            outcome = generation_failed(state, request, reason, now_s), ()
        case CheckRequest():
            outcome = _rejected(context, state, request.update, reason)
        case AggregationRequest():
            outcome = not_aggregated(context, state, request, reason, now_s)
        case _:
            never(request)
    return outcome


def tasks_wanted(state: RunState) -> tuple[TaskRequest, ...]:
    """The requests for the tasks that are not out yet."""
    clients = (client for _, client in sorted(state.clients.items()) if client.stage == "preparing")
    requests = (task_wanted(state, client) for client in clients)
    return tuple(request for request in requests if request is not None)


def _task(context: RunContext, state: RunState, wanted: TaskRequest, made: PreparedTask, now_s: float) -> Outcome:
    client = state.clients.get(wanted.client_id)
    if state.phase != "train" or client is None or wanted.round != state.round or client.stage != "preparing":
        return state, ()
    if client.size is None or (client.attempt, client.size.architecture_id) != (
        wanted.attempt,
        wanted.participant.size.architecture_id,
    ):
        return state, ()
    if lacking(context, state):  # a smaller size could not be chosen yet; it is asked for again when it can
        return state, ()
    state = _with_known(context, state, client, made.facts)
    client, actions = prepared_client(context, state, client, made, now_s)
    return state.with_clients(client), actions


def _with_known(context: RunContext, state: RunState, client: ClientState, facts: ProgramFacts) -> RunState:
    """The state with what was learned of a client's training program; nothing is learned in the deploy phase."""
    if client.given is None or state.phase != "train":
        return state
    program = SizedProgram(size=client.given.size, target=client.offer.runtime, student=client.given.student)
    return state if program.key in state.written else _learned(context, state, program, facts)


def _learned(context: RunContext, state: RunState, program: SizedProgram, facts: ProgramFacts) -> RunState:
    """The state that knows one more written program; what was told of it first stays."""
    one = WrittenProgram(program=program, facts=facts, turn=state.turn)
    written = MappingProxyType({program.key: one, **state.written})
    live = replace(state.live, written_estimates=_estimated(context, state, program))
    return replace(state, written=written, live=live)


def _estimated(context: RunContext, state: RunState, program: SizedProgram) -> Mapping[str, Candidate]:
    """What written programs cost by cost estimates, with one more: told once, as each choice goes by all of them."""
    if context.roles.assigner.search is None or not has_estimates(context, state, program.target):
        return state.live.written_estimates
    estimate = estimates_of(context, state, program.target)(program.size)
    return MappingProxyType({**state.live.written_estimates, program.key: estimate})


def _without(context: RunContext, state: RunState, client: ClientState | None, reason: str) -> RunState:
    """Without a client whose task or models cannot be made."""
    if client is None or client.stage != "preparing":
        return state
    state = _with_known(context, state, client, ProgramFacts.untrainable(reason))
    lasts: Lasts = lasting_of(context, state, client) if state.phase == "train" else "passing"
    return state.with_clients(replace(client, stage="skipped", reason=reason, lasts=lasts))


def _scoring(
    context: RunContext, state: RunState, request: ScoringRequest, candidates: Sequence[Scorable], now_s: float
) -> Outcome:
    client = state.clients.get(request.client_id)
    if state.phase != "train" or client is None or request.round != state.round:
        return state, ()
    if client.stage != "scoring" or client.task is not None:
        return state, ()
    client, actions = scoring_client(context, state, client, candidates, now_s)
    return state.with_clients(client), actions


def _models(
    context: RunContext, state: RunState, request: ModelsRequest, made: ExportedModels, now_s: float
) -> Outcome:
    client = state.clients.get(request.client_id)
    if state.phase != "deploy" or client is None or client.stage != "preparing":
        return state, ()
    programs = models_with_room(client, made.programs)
    if not programs:
        disk_bytes = client.offer.budget.disk_bytes if client.offer.budget else 0
        reason = f"none of its models fits the {disk_bytes} bytes of its disk twice"
        return state.with_clients(replace(client, stage="skipped", reason=reason)), ()
    task, targets = deploy_task(context, state, client, programs, now_s), {one.target for one in programs}
    models = tuple(model for model in made.models if model.target in targets)
    return state.with_clients(replace(client, stage="out", task=task, models=models)), (SendTask(task=task),)


def _program(context: RunContext, state: RunState, wanted: ProgramRequest, facts: ProgramFacts) -> RunState:
    """A program for later rounds; of one that cannot be written it is known that nobody can be given it."""
    if wanted.program not in state.queue:
        return state
    state = replace(state, queue=tuple(one for one in state.queue if one != wanted.program))
    return _learned(context, state, wanted.program, facts)


def _with_estimates(context: RunContext, state: RunState, wanted: CostRequest, estimates: TargetEstimates) -> Outcome:
    """Sizes can be chosen for a target; what was told of it first stays."""
    known = MappingProxyType({wanted.key: estimates, **state.live.estimates})
    state = state.without_request(wanted)
    return _onwards(context, replace(state, live=replace(state.live, estimates=known)))


def _explored(context: RunContext, state: RunState, request: SearchRequest, made: SearchResult) -> Outcome:
    state = state.without_request(request)
    if request.turn != state.turn:
        return state, ()
    if state.explored_turn != state.turn:
        pool = tuple(dict.fromkeys((*state.pool, *made.found)))
        state = replace(state, pool=pool, explored_turn=state.turn)
    written = MappingProxyType({**state.live.written_estimates, **made.written_estimates})
    live = replace(state.live, searches=made.searches, written_estimates=written)
    return _onwards(context, replace(state, live=live))


def _unexplored(state: RunState, wanted: SearchRequest, reason: str) -> RunState:
    """A search that fails leaves nothing to give, nor a smaller size where a server before this one had given one."""
    state = state.without_request(wanted)
    if wanted.turn != state.turn:
        return state
    skipped = {
        name: replace(client, stage="skipped", reason=reason)
        for name, client in state.clients.items()
        if client.stage in ("answered", "preparing")
    }
    return replace(state, clients=MappingProxyType({**state.clients, **skipped}))


def _onwards(context: RunContext, state: RunState) -> Outcome:
    """Ask for what is to be made next; where nothing is, for tasks that a server before this one was preparing."""
    if state.phase != "train":
        return state, ()
    wanted = lacking(context, state)
    return asking(state, wanted) if wanted else (state, tasks_wanted(state))


def _update(context: RunContext, state: RunState, update: Update, change: ChangeSize, now_s: float) -> Outcome:
    """An update whose blob is on disk, synced and checked."""
    verdict, reason = judge(context, state, update)
    answer = reply(update.client_id, update.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    client = state.clients[update.client_id]
    took_s = max(0.0, now_s - sent_s(context, state, client, "training"))
    state = with_answer(state, update.client_id, "training", took_s)
    client = replace(client, stage="done", trained=Trained(update=update, change=change, took_s=took_s))
    return state.with_clients(client), (answer, Withdraw(task_id=update.task_id))


def _rejected(context: RunContext, state: RunState, update: Update, why: str) -> Outcome:
    """An update whose blob is not what it should be."""
    verdict, reason = judge(context, state, update)
    if verdict != "accepted":
        return state, (reply(update.client_id, update.message_id, verdict, reason),)
    client = replace(state.clients[update.client_id], stage="refused", reason=why, lasts="lasting", outlier=why)
    answer = reply(update.client_id, update.message_id, "refused", why)
    return state.with_clients(client), (answer, Withdraw(task_id=update.task_id))
