"""What follows when something that was asked for is made, or cannot be. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.actions import Action, Request, SendTask
from subfleet.rounds.events import Failed, Ready
from subfleet.rounds.exhaustive import never
from subfleet.rounds.pricing import has_prices, prices_of, target_prices
from subfleet.rounds.proposing import scoring_seat
from subfleet.rounds.requests import (
    Explored,
    ModelsMade,
    ModelsWanted,
    PricesMade,
    PricesWanted,
    ProgramFacts,
    ProgramMade,
    ProgramWanted,
    ScoringMade,
    ScoringWanted,
    SearchWanted,
    TaskMade,
    TaskWanted,
)
from subfleet.rounds.seating import prepared_seat, task_for_models, task_wanted
from subfleet.rounds.sizing import asking, lacking
from subfleet.rounds.state import Plan, RunState, Seat, TargetPrices
from subfleet.rounds.written import NO_PROGRAM_BYTES, KnownPlan
from subfleet.search.candidates import Candidate
from subfleet.search.queue import plan_key

__all__ = ["came", "failed", "tasks_wanted"]

Outcome = tuple[RunState, tuple[Action, ...]]


def came(plan: Plan, state: RunState, event: Ready, now_s: float) -> Outcome:
    """Take in what was made; what nobody waits for any more changes nothing."""
    made = event.made
    match made:
        case TaskMade():
            outcome = _task(plan, state, made, now_s)
        case ScoringMade():
            outcome = _scoring(plan, state, made, now_s)
        case ModelsMade():
            outcome = _models(plan, state, made, now_s)
        case ProgramMade():
            outcome = _program(plan, state, made.wanted, made.facts), ()
        case PricesMade():
            prices = target_prices(plan, made.wanted.target, made.memory)
            outcome = _with_prices(plan, state, made.wanted, prices)
        case Explored():
            outcome = _explored(plan, state, made)
        case _:
            never(made)
    return outcome


def failed(plan: Plan, state: RunState, event: Failed, now_s: float) -> Outcome:
    """Go on without what cannot be made."""
    wanted = event.wanted
    match wanted:
        case TaskWanted():
            outcome: Outcome = _without(plan, state, wanted.client_id, (wanted.round, wanted.attempt), event.reason), ()
        case ModelsWanted():
            outcome = _without(plan, state, wanted.client_id, (wanted.round, 0), event.reason), ()
        case ScoringWanted():
            outcome = _scoring(plan, state, ScoringMade(wanted=wanted, candidates=()), now_s)
        case ProgramWanted():
            outcome = _program(plan, state, wanted, ProgramFacts(planned_peak_bytes=NO_PROGRAM_BYTES)), ()
        case PricesWanted():
            prices = target_prices(plan, wanted.target, None, event.reason)
            outcome = _with_prices(plan, state, wanted, prices)
        case SearchWanted():
            outcome = _unexplored(state, wanted, event.reason), ()
        case _:
            never(wanted)
    return outcome


def tasks_wanted(state: RunState) -> tuple[Request, ...]:
    """What the tasks are made of that are not out yet."""
    seats = (seat for _, seat in sorted(state.seats.items()) if seat.stage == "preparing")
    wanted = (task_wanted(state, seat) for seat in seats)
    return tuple(Request(wanted=one) for one in wanted if one is not None)


def _with_seat(state: RunState, seat: Seat) -> RunState:
    return replace(state, seats=MappingProxyType({**state.seats, seat.client_id: seat}))


def _task(plan: Plan, state: RunState, made: TaskMade, now_s: float) -> Outcome:
    wanted = made.wanted
    seat = state.seats.get(wanted.client_id)
    if state.phase != "train" or seat is None or wanted.round != state.round or seat.stage != "preparing":
        return state, ()
    if seat.size is None or (seat.attempt, seat.size.spec_id) != (wanted.attempt, wanted.participant.size.spec_id):
        return state, ()
    if lacking(plan, state):  # a smaller size could not be chosen yet; it is asked for again when it can
        return state, ()
    state = _with_known(plan, state, seat, made.facts)
    seat, actions = prepared_seat(plan, state, seat, made, now_s)
    return _with_seat(state, seat), actions


def _with_known(plan: Plan, state: RunState, seat: Seat, facts: ProgramFacts) -> RunState:
    """The state with what was learned of the program of a seat; in the deploy phase it is no training program."""
    if seat.size is None or state.phase != "train":
        return state
    if plan_key(seat.runtime, seat.size, seat.student) in state.plans:
        return state
    known = KnownPlan(
        size=seat.size,
        target=seat.runtime,
        planned_peak_bytes=facts.planned_peak_bytes,
        turn=state.turn,
        operators=facts.operators,
        packings=facts.packings,
        student=seat.student,
    )
    plans = MappingProxyType({**state.plans, known.key: known})
    return replace(state, plans=plans, written_prices=_priced(plan, state, known))


def _priced(plan: Plan, state: RunState, known: KnownPlan) -> Mapping[str, Candidate]:
    """What written programs cost by prices, with one more: told once, as each choice goes by all of them."""
    if plan.policies.search is None or not has_prices(plan, state, known.target):
        return state.written_prices
    price = prices_of(plan, state, known.target)(known.size)
    return MappingProxyType({**state.written_prices, known.key: price})


def _without(plan: Plan, state: RunState, client_id: str, choice: tuple[int, int], reason: str) -> RunState:
    """Without a client whose task or models cannot be made."""
    seat = state.seats.get(client_id)
    if seat is None or seat.stage != "preparing" or (state.round, seat.attempt) != choice:
        return state
    state = _with_known(plan, state, seat, ProgramFacts(planned_peak_bytes=NO_PROGRAM_BYTES))
    return _with_seat(state, replace(seat, stage="skipped", reason=reason))


def _scoring(plan: Plan, state: RunState, made: ScoringMade, now_s: float) -> Outcome:
    seat = state.seats.get(made.wanted.client_id)
    if state.phase != "train" or seat is None or made.wanted.round != state.round:
        return state, ()
    if seat.stage != "scoring" or seat.task is not None:
        return state, ()
    seat, actions = scoring_seat(plan, state, seat, made, now_s)
    return _with_seat(state, seat), actions


def _models(plan: Plan, state: RunState, made: ModelsMade, now_s: float) -> Outcome:
    seat = state.seats.get(made.wanted.client_id)
    if state.phase != "deploy" or seat is None or seat.stage != "preparing":
        return state, ()
    task = task_for_models(plan, state, seat, made.programs, now_s)
    return _with_seat(state, replace(seat, stage="out", task=task, models=made.models)), (SendTask(task=task),)


def _program(plan: Plan, state: RunState, wanted: ProgramWanted, facts: ProgramFacts) -> RunState:
    """A program for later rounds; of one that cannot be written it is known that nobody can be given it."""
    queued = wanted.queued
    if queued not in state.queue:
        return state
    known = KnownPlan(
        size=queued.size,
        target=queued.target,
        planned_peak_bytes=facts.planned_peak_bytes,
        turn=state.turn,
        operators=facts.operators,
        packings=facts.packings,
    )
    return replace(
        state,
        queue=tuple(one for one in state.queue if one != queued),
        plans=MappingProxyType({known.key: known, **state.plans}),
        written_prices=_priced(plan, state, known),
    )


def _with_prices(plan: Plan, state: RunState, wanted: PricesWanted, prices: TargetPrices) -> Outcome:
    """Sizes can be chosen for a target; what was told of it first stays."""
    known = MappingProxyType({wanted.target: prices, **state.prices})
    return _onwards(plan, replace(state, asked=state.asked - {wanted}, prices=known))


def _explored(plan: Plan, state: RunState, made: Explored) -> Outcome:
    state = replace(state, asked=state.asked - {made.wanted})
    if made.wanted.turn != state.turn:
        return state, ()
    if state.explored_turn != state.turn:
        pool = tuple(dict.fromkeys((*state.pool, *made.found)))
        state = replace(state, pool=pool, explored_turn=state.turn)
    written = MappingProxyType({**state.written_prices, **made.written_prices})
    return _onwards(plan, replace(state, searches=made.searches, written_prices=written))


def _unexplored(state: RunState, wanted: SearchWanted, reason: str) -> RunState:
    """A search that fails leaves nothing to give, nor a smaller size where a server before this one had given one."""
    state = replace(state, asked=state.asked - {wanted})
    if wanted.turn != state.turn:
        return state
    skipped = {
        name: replace(seat, stage="skipped", reason=reason)
        for name, seat in state.seats.items()
        if seat.stage in ("answered", "preparing")
    }
    return replace(state, seats=MappingProxyType({**state.seats, **skipped}))


def _onwards(plan: Plan, state: RunState) -> Outcome:
    """Ask for what is to be made next; where nothing is, for tasks that a server before this one was preparing."""
    if state.phase != "train":
        return state, ()
    wanted = lacking(plan, state)
    return asking(state, wanted) if wanted else (state, tasks_wanted(state))
