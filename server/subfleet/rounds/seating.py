"""One client's seat: what it is given, and what follows from its answers. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.methods.assigner import Assignment, AssignmentContext, WrittenSize
from subfleet.protocol.memory import planned_for
from subfleet.protocol.messages import Profile, Telemetry
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.actions import Action, SendTask
from subfleet.rounds.counting import counts
from subfleet.rounds.deciding import deciding_limit
from subfleet.rounds.declarations import declaration_of
from subfleet.rounds.fitting_plans import operators_of, planned_for_seat
from subfleet.rounds.labels import class_counts_of
from subfleet.rounds.networks import NOT_YET, in_use, own_size, standing_for
from subfleet.rounds.pricing import candidates_of, prices_of
from subfleet.rounds.reasons import Lasts, nothing_left
from subfleet.rounds.samples import samples_problem, scale_warning
from subfleet.rounds.state import Offer, RunState, Seat, Submodel
from subfleet.rounds.tasks import draw_of, train_task
from subfleet.rounds.terms import Terms
from subfleet.rounds.unfit import unfit_sizes
from subfleet.rounds.weighing import objection
from subfleet.rounds.work import PreparedTask, TaskRequest
from subfleet.rounds.written import ProgramFacts
from subfleet.search.candidates import budget_of, forward_macs_of, lacking_operators
from subfleet.search.fitting import Limit
from subfleet.search.query import Search

__all__ = [
    "MOST_CHARACTERS",
    "ask_of",
    "assigned_seat",
    "choose_below",
    "given_seat",
    "measured_seat",
    "prepared_seat",
    "task_wanted",
]

MOST_CHARACTERS = 400  # of a reason, as it stands in tables


def measured_seat(terms: Terms, state: RunState, profile: Profile, telemetry: Telemetry) -> Seat:
    """The seat of a client that has told what it can give; skipped where it can take no part at all.

    Args:
        terms: of the run.
        state: of the run. What a refusal has told of a disk counts where the telemetry tells nothing.
        profile: of the client.
        telemetry: what it told.
    """
    if telemetry.disk_budget_bytes is None:
        telemetry = replace(telemetry, disk_budget_bytes=state.disks.get(profile.client_id))
    class_counts, odd_classes = class_counts_of(terms.config, profile)
    seat = Seat(
        client_id=profile.client_id,
        device=profile.device,
        stage="answered",
        offer=Offer(
            runtime=next((name for name in profile.runtimes if name in terms.config.targets), ""),
            packing_width=profile.packing_width,
            macs_per_s=profile.macs_per_s,
            budget=_budget(terms, profile, telemetry, telemetry.reading, telemetry.memory_budget_bytes),
            lasting=_lasting(terms, profile, telemetry),
            memory_free_bytes=telemetry.reading.memory_free_bytes,
            memory_budget_bytes=_memory_bytes(terms, profile, telemetry.memory_budget_bytes),
            sample_count=profile.sample_count,
            telemetry_id=telemetry.message_id,
            class_counts=class_counts,
            data_warning=scale_warning(terms, profile),
        ),
    )
    reason = _why_not(terms, profile, seat.offer.runtime) or odd_classes
    if terms.config.data.check == "refuse":
        reason = reason or seat.offer.data_warning
    if terms.roles.assigner.declarations:
        declared = declaration_of(terms, profile, state.brought.get(profile.client_id, ()))
        seat = replace(
            seat,
            offer=replace(seat.offer, architecture=declared.size, brought=declared.network),
        )
        reason = reason or declared.reason
    if reason:  # as long as its profile stays what it is
        return replace(seat, stage="skipped", reason=reason[:MOST_CHARACTERS], lasts="lasting")
    if not telemetry.reading.available:
        return replace(seat, stage="skipped", reason="the device is not available now")
    return seat


def _budget(terms: Terms, profile: Profile, telemetry: Telemetry, link: Reading | LogLow, offered_bytes: int) -> Budget:
    return budget_of(
        link,
        _memory_bytes(terms, profile, offered_bytes),
        communication_s=terms.config.communication_s,
        forward_macs=_forward_macs(terms, profile, telemetry.round or 1),
        disk_bytes=telemetry.disk_budget_bytes,
    )


def _forward_macs(terms: Terms, profile: Profile, round_number: int) -> int | None:
    """What it may take for a sample, by the seconds of a round and by those of a batch; None is no limit."""
    training, config = terms.training(round_number), terms.config
    limits = ((config.training_s, training.sample_passes(profile.sample_count)), (config.batch_s, training.batch_size))
    found = [forward_macs_of(profile.macs_per_s, seconds, count) for seconds, count in limits]
    return min((most for most in found if most is not None), default=None)


def _lasting(terms: Terms, profile: Profile, telemetry: Telemetry) -> Budget | None:
    """What it says of its log; believed as its budget is: what it claims beyond that, no task is held against."""
    low = telemetry.log_low
    if low is None or terms.log_quantile is None:
        return None
    return _budget(terms, profile, telemetry, low, low.memory_budget_bytes)


def _memory_bytes(terms: Terms, profile: Profile, offered_bytes: int) -> int:
    limits = terms.config.memory_limits
    return limits.bounded(offered_bytes, device=profile.device, client_id=profile.client_id)


def _why_not(terms: Terms, profile: Profile, runtime: str) -> str:
    if unfit := samples_problem(terms.config, profile):
        return unfit
    if not runtime:
        return f"it runs {', '.join(profile.runtimes)}, but programs are made for {', '.join(terms.config.targets)}"
    return ""


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
