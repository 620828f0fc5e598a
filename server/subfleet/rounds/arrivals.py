"""What follows when work beside the loop is done, or has failed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Update
from subfleet.rounds.actions import Action, AggregationRequest, SendTask, Withdraw
from subfleet.rounds.answers import judge, reply
from subfleet.rounds.awaiting import sent_s, with_answer
from subfleet.rounds.closing import folded, not_folded
from subfleet.rounds.evaluating import evaluation_made
from subfleet.rounds.events import Done, Failed
from subfleet.rounds.fitting import models_with_room
from subfleet.rounds.live import TargetPrices
from subfleet.rounds.networks import begun_with
from subfleet.rounds.pricing import has_prices, prices_of, target_prices
from subfleet.rounds.proposing import scoring_seat
from subfleet.rounds.searching import generation_failed, generation_made
from subfleet.rounds.seating import lasting_of, prepared_seat, task_wanted
from subfleet.rounds.sizing import asking, lacking
from subfleet.rounds.state import Lasts, RunState, Seat, Trained
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.tasks import deploy_task
from subfleet.rounds.terms import Terms
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
from subfleet.rounds.written import ProgramFacts, WrittenProgram
from subfleet.search.candidates import Candidate
from subfleet.search.queue import SizedProgram

__all__ = ["tasks_wanted", "with_failure", "with_result"]

Outcome = tuple[RunState, tuple[Action, ...]]


def with_result(  # noqa: C901, PLR0912 - a case for each request
    terms: Terms, state: RunState, event: Done, now_s: float
) -> Outcome:
    """Take in the result of a request; one that nobody waits for any more changes nothing."""
    request, result = event.request, event.result
    match request:
        case TaskRequest():
            outcome = _task(terms, state, request, result, now_s)
        case ScoringRequest():
            outcome = _scoring(terms, state, request, result, now_s)
        case EvaluationRequest():
            outcome = evaluation_made(terms, state, request, result, now_s)
        case ModelsRequest():
            outcome = _models(terms, state, request, result, now_s)
        case ProgramRequest():
            outcome = _program(terms, state, request, result), ()
        case CostRequest():
            outcome = _with_prices(terms, state, request, target_prices(terms, request, result))
        case SearchRequest():
            outcome = _explored(terms, state, request, result)
        case NetworksRequest():
            outcome = begun_with(terms, state, request, result), ()
        case GenerationRequest():
            outcome = generation_made(terms, state, request, result, now_s)
        case CheckRequest():
            outcome = _update(terms, state, request.update, result, now_s)
        case AggregationRequest():
            outcome = folded(terms, state, request, result, now_s)
        case _:
            never(request)
    return outcome


def with_failure(  # noqa: C901, PLR0912 - a case for each request
    terms: Terms, state: RunState, event: Failed, now_s: float
) -> Outcome:
    """Go on without the result of a request."""
    request, reason = event.request, event.reason
    match request:
        case TaskRequest():
            seat = state.seats.get(request.client_id) if state.phase == "train" else None
            known = seat is not None and (state.round, seat.attempt) == (request.round, request.attempt)
            outcome: Outcome = _without(terms, state, seat if known else None, reason), ()
        case EvaluationRequest() | ModelsRequest():
            # What fails late may be of another phase, in which the client has another seat.
            phases = ("evaluate", "search") if isinstance(request, EvaluationRequest) else ("deploy",)
            known = state.phase in phases and state.round == request.round
            seat = state.seats.get(request.client_id) if known else None
            outcome = _without(terms, state, seat, reason), ()
        case ScoringRequest():
            outcome = _scoring(terms, state, request, (), now_s)
        case ProgramRequest():
            outcome = _program(terms, state, request, ProgramFacts.none(reason)), ()
        case CostRequest():
            outcome = _with_prices(terms, state, request, target_prices(terms, request, None, reason))
        case SearchRequest():
            outcome = _unexplored(state, request, reason), ()
        case NetworksRequest():
            outcome = begun_with(terms, state, request, ()), ()
        case GenerationRequest():
            outcome = generation_failed(state, request, reason, now_s), ()
        case CheckRequest():
            outcome = _rejected(terms, state, request.update, reason)
        case AggregationRequest():
            outcome = not_folded(terms, state, request, reason, now_s)
        case _:
            never(request)
    return outcome


def tasks_wanted(state: RunState) -> tuple[TaskRequest, ...]:
    """The requests for the tasks that are not out yet."""
    seats = (seat for _, seat in sorted(state.seats.items()) if seat.stage == "preparing")
    requests = (task_wanted(state, seat) for seat in seats)
    return tuple(request for request in requests if request is not None)


def _task(terms: Terms, state: RunState, wanted: TaskRequest, made: PreparedTask, now_s: float) -> Outcome:
    seat = state.seats.get(wanted.client_id)
    if state.phase != "train" or seat is None or wanted.round != state.round or seat.stage != "preparing":
        return state, ()
    if seat.size is None or (seat.attempt, seat.size.spec_id) != (wanted.attempt, wanted.participant.size.spec_id):
        return state, ()
    if lacking(terms, state):  # a smaller size could not be chosen yet; it is asked for again when it can
        return state, ()
    state = _with_known(terms, state, seat, made.facts)
    seat, actions = prepared_seat(terms, state, seat, made, now_s)
    return state.with_seats(seat), actions


def _with_known(terms: Terms, state: RunState, seat: Seat, facts: ProgramFacts) -> RunState:
    """The state with what was learned of the program of a seat; in the deploy phase it is no training program."""
    if seat.given is None or state.phase != "train":
        return state
    program = SizedProgram(size=seat.given.size, target=seat.offer.runtime, student=seat.given.student)
    return state if program.key in state.written else _learned(terms, state, program, facts)


def _learned(terms: Terms, state: RunState, program: SizedProgram, facts: ProgramFacts) -> RunState:
    """The state that knows one more written program; what was told of it first stays."""
    one = WrittenProgram(program=program, facts=facts, turn=state.turn)
    written = MappingProxyType({program.key: one, **state.written})
    live = replace(state.live, written_prices=_priced(terms, state, program))
    return replace(state, written=written, live=live)


def _priced(terms: Terms, state: RunState, program: SizedProgram) -> Mapping[str, Candidate]:
    """What written programs cost by prices, with one more: told once, as each choice goes by all of them."""
    if terms.roles.assigner.search is None or not has_prices(terms, state, program.target):
        return state.live.written_prices
    price = prices_of(terms, state, program.target)(program.size)
    return MappingProxyType({**state.live.written_prices, program.key: price})


def _without(terms: Terms, state: RunState, seat: Seat | None, reason: str) -> RunState:
    """Without a client whose task or models cannot be made."""
    if seat is None or seat.stage != "preparing":
        return state
    state = _with_known(terms, state, seat, ProgramFacts.none(reason))
    lasts: Lasts = lasting_of(terms, state, seat) if state.phase == "train" else "passing"
    return state.with_seats(replace(seat, stage="skipped", reason=reason, lasts=lasts))


def _scoring(
    terms: Terms, state: RunState, request: ScoringRequest, candidates: Sequence[Scorable], now_s: float
) -> Outcome:
    seat = state.seats.get(request.client_id)
    if state.phase != "train" or seat is None or request.round != state.round:
        return state, ()
    if seat.stage != "scoring" or seat.task is not None:
        return state, ()
    seat, actions = scoring_seat(terms, state, seat, candidates, now_s)
    return state.with_seats(seat), actions


def _models(terms: Terms, state: RunState, request: ModelsRequest, made: ExportedModels, now_s: float) -> Outcome:
    seat = state.seats.get(request.client_id)
    if state.phase != "deploy" or seat is None or seat.stage != "preparing":
        return state, ()
    programs = models_with_room(seat, made.programs)
    if not programs:
        disk_bytes = seat.offer.budget.disk_bytes if seat.offer.budget else 0
        reason = f"none of its models fits the {disk_bytes} bytes of its disk twice"
        return state.with_seats(replace(seat, stage="skipped", reason=reason)), ()
    task, targets = deploy_task(terms, state, seat, programs, now_s), {one.target for one in programs}
    models = tuple(model for model in made.models if model.target in targets)
    return state.with_seats(replace(seat, stage="out", task=task, models=models)), (SendTask(task=task),)


def _program(terms: Terms, state: RunState, wanted: ProgramRequest, facts: ProgramFacts) -> RunState:
    """A program for later rounds; of one that cannot be written it is known that nobody can be given it."""
    if wanted.program not in state.queue:
        return state
    state = replace(state, queue=tuple(one for one in state.queue if one != wanted.program))
    return _learned(terms, state, wanted.program, facts)


def _with_prices(terms: Terms, state: RunState, wanted: CostRequest, prices: TargetPrices) -> Outcome:
    """Sizes can be chosen for a target; what was told of it first stays."""
    known = MappingProxyType({wanted.key: prices, **state.live.prices})
    state = state.without_request(wanted)
    return _onwards(terms, replace(state, live=replace(state.live, prices=known)))


def _explored(terms: Terms, state: RunState, request: SearchRequest, made: SearchResult) -> Outcome:
    state = state.without_request(request)
    if request.turn != state.turn:
        return state, ()
    if state.explored_turn != state.turn:
        pool = tuple(dict.fromkeys((*state.pool, *made.found)))
        state = replace(state, pool=pool, explored_turn=state.turn)
    written = MappingProxyType({**state.live.written_prices, **made.written_prices})
    live = replace(state.live, searches=made.searches, written_prices=written)
    return _onwards(terms, replace(state, live=live))


def _unexplored(state: RunState, wanted: SearchRequest, reason: str) -> RunState:
    """A search that fails leaves nothing to give, nor a smaller size where a server before this one had given one."""
    state = state.without_request(wanted)
    if wanted.turn != state.turn:
        return state
    skipped = {
        name: replace(seat, stage="skipped", reason=reason)
        for name, seat in state.seats.items()
        if seat.stage in ("answered", "preparing")
    }
    return replace(state, seats=MappingProxyType({**state.seats, **skipped}))


def _onwards(terms: Terms, state: RunState) -> Outcome:
    """Ask for what is to be made next; where nothing is, for tasks that a server before this one was preparing."""
    if state.phase != "train":
        return state, ()
    wanted = lacking(terms, state)
    return asking(state, wanted) if wanted else (state, tasks_wanted(state))


def _update(terms: Terms, state: RunState, update: Update, change: ChangeSize, now_s: float) -> Outcome:
    """An update whose blob is on disk, synced and checked."""
    verdict, reason = judge(terms, state, update)
    answer = reply(update.client_id, update.message_id, verdict, reason)
    if verdict != "accepted":
        return state, (answer,)
    seat = state.seats[update.client_id]
    took_s = max(0.0, now_s - sent_s(terms, state, seat, "training"))
    state = with_answer(state, update.client_id, "training", took_s)
    seat = replace(seat, stage="done", trained=Trained(update=update, change=change, took_s=took_s))
    return state.with_seats(seat), (answer, Withdraw(task_id=update.task_id))


def _rejected(terms: Terms, state: RunState, update: Update, why: str) -> Outcome:
    """An update whose blob is not what it should be."""
    verdict, reason = judge(terms, state, update)
    if verdict != "accepted":
        return state, (reply(update.client_id, update.message_id, verdict, reason),)
    seat = replace(state.seats[update.client_id], stage="refused", reason=why, lasts="lasting", outlier=why)
    answer = reply(update.client_id, update.message_id, "refused", why)
    return state.with_seats(seat), (answer, Withdraw(task_id=update.task_id))
