"""What a client is given: chosen by its method, judged by its program's plan, replaced after a refusal. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.methods.assigner import Assignment, AssignmentContext, WrittenSize
from subfleet.protocol.memory import planned_for
from subfleet.protocol.messages import Refusal
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.text import printable
from subfleet.rounds.actions import Action, SendTask
from subfleet.rounds.fitting import objection, operators_of, planned_for_seat
from subfleet.rounds.networks import NOT_YET, counts, in_use, own_size, standing_for
from subfleet.rounds.offers import MOST_CHARACTERS
from subfleet.rounds.pricing import candidates_of, prices_of
from subfleet.rounds.refusals import REFUSALS, nothing_left, unfit_sizes
from subfleet.rounds.state import Lasts, RunState, Seat, Submodel
from subfleet.rounds.tasks import draw_of, train_task
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import PreparedTask, TaskRequest
from subfleet.rounds.written import ProgramFacts
from subfleet.search.candidates import Candidate, lacking_operators
from subfleet.search.fitting import LIMITS, Limit
from subfleet.search.query import Search

__all__ = [
    "BY_METHOD",
    "ask_of",
    "assigned_seat",
    "choose_below",
    "deciding_limit",
    "given_seat",
    "lasting_of",
    "prepared_seat",
    "reason_of",
    "refused_seat",
    "task_wanted",
    "with_less",
    "with_room",
]


def assigned_seat(terms: Terms, state: RunState, seat: Seat) -> tuple[Seat, tuple[Action, ...]]:
    """Choose a subnet for a client that has answered."""
    if seat.offer.budget is None:
        return replace(seat, stage="skipped", reason="it told no budget"), ()
    if seat.offer.brought is not None and own_size(terms, state.lineages, seat) is None:
        return replace(seat, stage="skipped", reason=NOT_YET), ()
    ask = ask_of(terms, state, seat)
    assigned = terms.roles.assigner.assign(ask)
    return given_seat(terms, state, replace(seat, first_wanted=assigned.wanted), ask, assigned)


def task_wanted(state: RunState, seat: Seat) -> TaskRequest | None:
    """What a seat's task is made of; None where it has no subnet yet."""
    if seat.participant is None:
        return None
    return TaskRequest(
        participant=seat.participant,
        round=state.round,
        attempt=seat.attempt,
        target=seat.offer.runtime,
        student=None if seat.given is None else seat.given.student,
    )


def prepared_seat(
    terms: Terms, state: RunState, seat: Seat, made: PreparedTask, now_s: float
) -> tuple[Seat, tuple[Action, ...]]:
    """Send the task if the program's own plan fits the budget, and the runtime has what it calls; else look below."""
    facts = made.facts
    lacking = lacking_operators(facts.operators, operators_of(state, seat.client_id))
    if lacking:
        return _without_operators(terms, state, seat, lacking)
    given = seat.given
    if seat.offer.budget is None or given is None:
        return choose_below(terms, state, seat, "memory")
    planned_bytes, unfit = planned_for_seat(seat, facts, operators_of(state, seat.client_id))
    if unfit or planned_bytes > _room_bytes(terms, state, seat):
        return _another(terms, state, seat, facts, "memory")
    task = train_task(terms, state, seat, made, planned_bytes, now_s)
    if (limit := objection(terms, state, seat, task)) is not None:
        return _another(terms, state, seat, facts, limit)
    return replace(seat, stage="out", task=task, reason=""), (SendTask(task=task),)


def _another(
    terms: Terms, state: RunState, seat: Seat, facts: ProgramFacts, limit: Limit
) -> tuple[Seat, tuple[Action, ...]]:
    """Another size in place of one whose program takes too much of something; or another subspace of the same."""
    if facts.chain is not None:
        return _subspace_anew(terms, state, seat, facts)
    return choose_below(terms, state, seat, limit)


def _subspace_anew(terms: Terms, state: RunState, seat: Seat, facts: ProgramFacts) -> tuple[Seat, tuple[Action, ...]]:
    """Another subspace, by what its program has told: it goes by nobody else's, whoever was answered first."""
    size = seat.size
    if size is None or seat.attempt + 1 >= terms.config.max_attempts:
        reason = "none of the subspaces that it was given has room, or an operator that its runtime has"
        return replace(seat, stage="skipped", given=None, reason=reason), ()
    known = WrittenSize(
        size=size,
        planned_peak_bytes=facts.planned_peak_bytes,
        operators=facts.operators,
        chain=facts.chain,
        program_bytes=facts.program_bytes,
    )
    ask = ask_of(terms, state, seat)
    ask = replace(ask, written=MappingProxyType({**ask.written, size.spec_id: known}))
    return given_seat(terms, state, replace(seat, attempt=seat.attempt + 1), ask, terms.roles.assigner.assign(ask))


def _room_bytes(terms: Terms, state: RunState, seat: Seat) -> int:
    """What a program may plan: what there is now, and for a size that is given for good also what its log has.

    The smallest size is given for good whatever the log has, as there is nothing below it.
    """
    room_bytes = seat.offer.budget.memory_bytes if seat.offer.budget is not None else 0
    smallest = candidates_of(terms, state, seat.offer.runtime)[0].spec
    if seat.offer.lasting is None or seat.client_id in state.last or seat.size == smallest:
        return room_bytes
    return min(room_bytes, seat.offer.lasting.memory_bytes)


def _without_operators(
    terms: Terms, state: RunState, seat: Seat, lacking: Sequence[str]
) -> tuple[Seat, tuple[Action, ...]]:
    """Another task while attempts are left: subnets of one network mostly call the same operators."""
    reason = f"its runtime {seat.offer.runtime!r} lacks {', '.join(lacking)}, which the program calls"[:MOST_CHARACTERS]
    skipped = replace(seat, stage="skipped", given=None, reason=reason)
    if seat.attempt + 1 >= terms.config.max_attempts:
        return skipped, ()
    chosen, actions = choose_below(terms, state, replace(seat, attempt=seat.attempt + 1), "runtime")
    return (chosen, actions) if chosen.open else (skipped, ())


def ask_of(
    terms: Terms,
    state: RunState,
    seat: Seat,
    *,
    below: SubnetSpec | None = None,
    below_limit: Limit = "memory",
    search: Search | None = None,
) -> AssignmentContext:
    """What a method is asked for a client; prices of its target must be there.

    Args:
        terms: of the run.
        state: of the run.
        seat: of the client.
        below: the size that it cannot have.
        below_limit: what keeps that from it.
        search: in place of the state's.
    """
    price = prices_of(terms, state, seat.offer.runtime)
    last = state.last.get(seat.client_id)
    known = None if last is None else standing_for(terms, state, last)
    written = {
        one.program.size.spec_id: WrittenSize(
            size=one.program.size,
            planned_peak_bytes=planned_for(one.facts.planned_peak_bytes, one.facts.packings, seat.offer.packing_width),
            operators=one.facts.operators,
            price=state.live.written_prices.get(key),
            chain=one.facts.chain,
            program_bytes=one.facts.program_bytes,
            problem=one.facts.problem,
        )
        for key, one in state.written.items()
        if one.program.target == seat.offer.runtime and one.program.student is None and counts(terms, state, one)
    }
    return AssignmentContext(
        networks=MappingProxyType({one.network.id: one.network for one in in_use(terms, state)}),
        candidates=candidates_of(terms, state, seat.offer.runtime),
        price=price,
        draw=draw_of(terms, state, seat),
        target=seat.offer.runtime,
        budget=seat.offer.budget or Budget(memory_bytes=0),
        previous=known.size if known is not None else None,
        below=price(below) if below is not None else None,
        below_limit=below_limit,
        search=search or state.live.searches.get(seat.offer.runtime),
        written=MappingProxyType(written),
        operators=operators_of(state, seat.client_id),
        refused=unfit_sizes(state, seat.client_id, seat.offer.runtime),
        declared=own_size(terms, state.lineages, seat),
        lasting=seat.offer.lasting,
    )


def choose_below(terms: Terms, state: RunState, seat: Seat, limit: Limit) -> tuple[Seat, tuple[Action, ...]]:
    """A smaller subnet, of those that were known when the round began: nothing depends on who was answered first."""
    ask = ask_of(terms, state, seat, below=seat.size, below_limit=limit)
    return given_seat(terms, state, seat, ask, terms.roles.assigner.assign(ask))


def given_seat(
    terms: Terms, state: RunState, seat: Seat, ask: AssignmentContext, assigned: Assignment
) -> tuple[Seat, tuple[Action, ...]]:
    """Give a client what was chosen for it; skipped where that is nothing."""
    if assigned.candidate is not None:
        ask = ask.of_network(assigned.candidate.spec.network)
    seat = replace(seat, limit=deciding_limit(ask, assigned.candidate, assigned.only))
    if assigned.candidate is None:
        reason = (assigned.reason or _why_none(state, seat, ask))[:MOST_CHARACTERS]
        lasts: Lasts = "lasting" if nothing_left(ask, assigned.only) else "passing"
        return replace(seat, stage="skipped", given=None, reason=reason, lasts=lasts), ()
    size, draw = assigned.candidate.spec, draw_of(terms, state, seat)
    network = ask.networks[size.network]
    given = Submodel(
        size=size,
        spec=assigned.placed or terms.roles.assigner.place(network, size, draw),
        student=terms.roles.training.student(network, size, draw),
        paths=assigned.paths,
        wanted=assigned.wanted,
    )
    seat = replace(seat, stage="preparing", given=given, task=None)
    wanted = task_wanted(state, seat)
    return seat, (wanted,) if wanted is not None else ()


def _why_none(state: RunState, seat: Seat, ask: AssignmentContext) -> str:
    if seat.offer.budget is None:
        return "it told no budget"
    problems = [one.problem for key, one in sorted(state.live.prices.items()) if key.endswith(seat.offer.runtime)]
    if problems and all(problems):
        return problems[0]
    if ask.below is not None:
        return f"no subnet below {ask.below.spec.name!r} fits: its program {ask.too_much}"
    return f"no subnet fits: the smallest {ask.why_not(ask.candidates[0]) or 'is not what the method gives'}"


BY_METHOD = "method"
"""A larger size would have fitted, and the method gave another."""


def deciding_limit(ask: AssignmentContext, given: Candidate | None, only: Candidate | None = None) -> str:
    """What keeps a client from more than it was given.

    A limit decides where a larger size is excluded by it alone. Where every larger size exceeds several limits, these
    decide together.

    Args:
        ask: what the method was asked for the client.
        given: what it gave; None where nothing fits.
        only: where nothing was given, the one size that might have been.

    Returns:
        Names of limits with "+" between them, "method", or nothing where the largest size was given.
    """
    if given is None and only is not None:
        return "+".join(limit for limit in LIMITS if limit in ask.exceeded(only))
    larger = [ask.exceeded(one) for one in ask.candidates if given is None or one.order > given.order]
    if not all(larger):
        return BY_METHOD
    alone = frozenset[str]().union(*(limits for limits in larger if len(limits) == 1))
    decides = alone or frozenset[str]().union(*larger)
    return "+".join(limit for limit in LIMITS if limit in decides)


def reason_of(refusal: Refusal) -> str:
    """A refusal in words that may be shown in terminals, where control characters act."""
    return f"{refusal.reason}: {printable(refusal.detail)}"[:MOST_CHARACTERS]


def refused_seat(terms: Terms, state: RunState, seat: Seat, refusal: Refusal) -> tuple[Seat, tuple[Action, ...]]:
    """A smaller task after a refusal that a smaller one may mend, while there is one and attempts are left.

    Else the seat is refused. What a device cannot run at all is told by the state.
    """
    course = REFUSALS[refusal.reason]
    final = replace(seat, stage="refused", reason=reason_of(refusal))
    if state.phase != "train":
        return final, ()
    if course.limit is not None and seat.attempt + 1 < terms.config.max_attempts and seat.offer.budget and seat.size:
        smaller = with_less(replace(seat, attempt=seat.attempt + 1), refusal)
        chosen, actions = choose_below(terms, state, smaller, course.limit)
        if chosen.open:
            return chosen, actions
    lasts = lasting_of(terms, state, seat) if course.of_program else course.lasts
    return replace(final, lasts=lasts), ()


def lasting_of(terms: Terms, state: RunState, seat: Seat) -> Lasts:
    """Whether a device to which a program could not be given, or of which it was refused, has nothing else left."""
    ask = ask_of(terms, state, seat)
    assigned = terms.roles.assigner.assign(ask)
    left = assigned.candidate is not None or not nothing_left(ask, assigned.only)
    return "passing" if left else "lasting"


def with_less(seat: Seat, refusal: Refusal) -> Seat:
    """The seat with no more in its budget than a refusal says that there is."""
    available_bytes = refusal.available_bytes
    if seat.offer.budget is None or available_bytes is None:
        return seat
    there_bytes, budget = max(0, available_bytes), seat.offer.budget
    if refusal.reason == "memory":
        return replace(
            seat, offer=replace(seat.offer, budget=replace(budget, memory_bytes=min(budget.memory_bytes, there_bytes)))
        )
    if refusal.reason == "disk":
        told_bytes = there_bytes if budget.disk_bytes is None else min(budget.disk_bytes, there_bytes)
        return replace(seat, offer=replace(seat.offer, budget=replace(budget, disk_bytes=told_bytes)))
    return seat


def with_room(state: RunState, refusal: Refusal) -> RunState:
    """The state that knows what may be written to a device's disk, for rounds in which it does not tell."""
    if refusal.reason != "disk" or refusal.available_bytes is None:
        return state
    known = {**state.disks, refusal.client_id: max(0, refusal.available_bytes)}
    return replace(state, disks=MappingProxyType(known))
