"""What follows when something that was asked for is made, or cannot be. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.actions import Action, Request, SendTask
from subfleet.rounds.beginning import begun_with
from subfleet.rounds.evaluating import evaluation_made
from subfleet.rounds.events import Failed, Ready
from subfleet.rounds.exhaustive import never
from subfleet.rounds.live import TargetPrices
from subfleet.rounds.pricing import has_prices, prices_of, target_prices
from subfleet.rounds.proposing import scoring_seat
from subfleet.rounds.reasons import Lasts
from subfleet.rounds.refusing import lasting_of
from subfleet.rounds.requests import (
    BeginningMade,
    BeginningWanted,
    EvaluationMade,
    EvaluationWanted,
    GenerationMade,
    GenerationWanted,
    ModelsMade,
    ModelsWanted,
    PricesMade,
    PricesWanted,
    ProgramMade,
    ProgramWanted,
    ScoringMade,
    ScoringWanted,
    SearchMade,
    SearchWanted,
    TaskMade,
    TaskWanted,
)
from subfleet.rounds.searching import generation_failed, generation_made
from subfleet.rounds.seating import prepared_seat, task_for_models, task_wanted
from subfleet.rounds.sizing import asking, lacking
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.weighing import models_with_room
from subfleet.rounds.written import ProgramFacts, WrittenProgram
from subfleet.search.candidates import Candidate
from subfleet.search.queue import SizedProgram

__all__ = ["came", "failed", "tasks_wanted"]

Outcome = tuple[RunState, tuple[Action, ...]]


def came(terms: Terms, state: RunState, event: Ready, now_s: float) -> Outcome:
    """Take in what was made; what nobody waits for any more changes nothing."""
    made = event.made
    match made:
        case TaskMade():
            outcome = _task(terms, state, made, now_s)
        case ScoringMade():
            outcome = _scoring(terms, state, made, now_s)
        case EvaluationMade():
            outcome = evaluation_made(terms, state, made, now_s)
        case ModelsMade():
            outcome = _models(terms, state, made, now_s)
        case ProgramMade():
            outcome = _program(terms, state, made.wanted, made.facts), ()
        case PricesMade():
            prices = target_prices(terms, made.wanted, made.memory)
            outcome = _with_prices(terms, state, made.wanted, prices)
        case SearchMade():
            outcome = _explored(terms, state, made)
        case BeginningMade():
            outcome = begun_with(terms, state, made), ()
        case GenerationMade():
            outcome = generation_made(terms, state, made, now_s)
        case _:
            never(made)
    return outcome


def failed(terms: Terms, state: RunState, event: Failed, now_s: float) -> Outcome:
    """Go on without what cannot be made."""
    wanted = event.wanted
    match wanted:
        case TaskWanted():
            seat = state.seats.get(wanted.client_id) if state.phase == "train" else None
            known = seat is not None and (state.round, seat.attempt) == (wanted.round, wanted.attempt)
            outcome: Outcome = _without(terms, state, seat if known else None, event.reason), ()
        case EvaluationWanted() | ModelsWanted():
            # What fails late may be of another phase, in which the client has another seat.
            phases = ("evaluate", "search") if isinstance(wanted, EvaluationWanted) else ("deploy",)
            known = state.phase in phases and state.round == wanted.round
            seat = state.seats.get(wanted.client_id) if known else None
            outcome = _without(terms, state, seat, event.reason), ()
        case ScoringWanted():
            outcome = _scoring(terms, state, ScoringMade(wanted=wanted, candidates=()), now_s)
        case ProgramWanted():
            outcome = _program(terms, state, wanted, ProgramFacts.none(event.reason)), ()
        case PricesWanted():
            prices = target_prices(terms, wanted, None, event.reason)
            outcome = _with_prices(terms, state, wanted, prices)
        case SearchWanted():
            outcome = _unexplored(state, wanted, event.reason), ()
        case BeginningWanted():
            outcome = begun_with(terms, state, BeginningMade(wanted=wanted, lineages=())), ()
        case GenerationWanted():
            outcome = generation_failed(state, wanted, event.reason, now_s), ()
        case _:
            never(wanted)
    return outcome


def tasks_wanted(state: RunState) -> tuple[Request, ...]:
    """What the tasks are made of that are not out yet."""
    seats = (seat for _, seat in sorted(state.seats.items()) if seat.stage == "preparing")
    wanted = (task_wanted(state, seat) for seat in seats)
    return tuple(Request(wanted=one) for one in wanted if one is not None)


def _task(terms: Terms, state: RunState, made: TaskMade, now_s: float) -> Outcome:
    wanted = made.wanted
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
    if terms.policies.search is None or not has_prices(terms, state, program.target):
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


def _scoring(terms: Terms, state: RunState, made: ScoringMade, now_s: float) -> Outcome:
    seat = state.seats.get(made.wanted.client_id)
    if state.phase != "train" or seat is None or made.wanted.round != state.round:
        return state, ()
    if seat.stage != "scoring" or seat.task is not None:
        return state, ()
    seat, actions = scoring_seat(terms, state, seat, made, now_s)
    return state.with_seats(seat), actions


def _models(terms: Terms, state: RunState, made: ModelsMade, now_s: float) -> Outcome:
    seat = state.seats.get(made.wanted.client_id)
    if state.phase != "deploy" or seat is None or seat.stage != "preparing":
        return state, ()
    programs = models_with_room(seat, made.programs)
    if not programs:
        disk_bytes = seat.offer.budget.disk_bytes if seat.offer.budget else 0
        reason = f"none of its models fits the {disk_bytes} bytes of its disk twice"
        return state.with_seats(replace(seat, stage="skipped", reason=reason)), ()
    task, targets = task_for_models(terms, state, seat, programs, now_s), {one.target for one in programs}
    models = tuple(model for model in made.models if model.target in targets)
    return state.with_seats(replace(seat, stage="out", task=task, models=models)), (SendTask(task=task),)


def _program(terms: Terms, state: RunState, wanted: ProgramWanted, facts: ProgramFacts) -> RunState:
    """A program for later rounds; of one that cannot be written it is known that nobody can be given it."""
    if wanted.program not in state.queue:
        return state
    state = replace(state, queue=tuple(one for one in state.queue if one != wanted.program))
    return _learned(terms, state, wanted.program, facts)


def _with_prices(terms: Terms, state: RunState, wanted: PricesWanted, prices: TargetPrices) -> Outcome:
    """Sizes can be chosen for a target; what was told of it first stays."""
    known = MappingProxyType({wanted.key: prices, **state.live.prices})
    state = state.without_request(wanted)
    return _onwards(terms, replace(state, live=replace(state.live, prices=known)))


def _explored(terms: Terms, state: RunState, made: SearchMade) -> Outcome:
    state = state.without_request(made.wanted)
    if made.wanted.turn != state.turn:
        return state, ()
    if state.explored_turn != state.turn:
        pool = tuple(dict.fromkeys((*state.pool, *made.found)))
        state = replace(state, pool=pool, explored_turn=state.turn)
    written = MappingProxyType({**state.live.written_prices, **made.written_prices})
    live = replace(state.live, searches=made.searches, written_prices=written)
    return _onwards(terms, replace(state, live=live))


def _unexplored(state: RunState, wanted: SearchWanted, reason: str) -> RunState:
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
