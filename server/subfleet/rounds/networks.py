"""The networks of a run: with which it begins, which are in use, what they cost, and when their programs count. Pure.

As long as a method changes none, there is the one that the configuration describes, and no lineage is written down.

A program that is written in a turn counts from the next one on. How long that takes is a matter of speed. A strict run
waits for the programs that its devices wish for, so that speed takes no part in it, unless its method has rounds go on.
The turns are in the journal and in what a run leaves behind, and a run with the same ones plays the same rounds again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Drawn, Lineage
from subfleet.methods.aggregator import Participant
from subfleet.methods.run_networks import BeginContext, StandingContext
from subfleet.protocol.memory import planned_for
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.state import RunState, Seat, remembered
from subfleet.rounds.terms import Declared, Terms
from subfleet.rounds.work import CostRequest, NetworksRequest
from subfleet.rounds.written import WrittenProgram
from subfleet.search.candidates import Candidate, why_not
from subfleet.search.queue import SizedProgram

__all__ = [
    "NEVER",
    "NOT_YET",
    "all_lineages",
    "beginning_of",
    "begun_with",
    "brought_anew",
    "carried_by",
    "counting_turns",
    "counts",
    "counts_from",
    "declared_of",
    "in_use",
    "lineages_in_use",
    "networks_told",
    "own_size",
    "price_of",
    "readiness_told",
    "standing_for",
    "to_begin",
    "waits_for_programs",
    "with_lineages",
]

NOT_YET = "the network that it brings is in no union; one has it from the next round on, unless it is too large"
"""Why a client is skipped in the round in which it comes."""


def all_lineages(terms: Terms, lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """Of all networks that the run has had, the one that it begins with first."""
    return lineages or (Lineage(id="", config=terms.config.model),)


def lineages_in_use(terms: Terms, state: RunState) -> tuple[Lineage, ...]:
    """Of the networks that sizes may be chosen of, in the order in which they appeared."""
    return tuple(one for one in all_lineages(terms, state.lineages) if one.living)


def in_use(terms: Terms, state: RunState) -> tuple[Declared, ...]:
    """The networks that sizes may be chosen of."""
    return tuple(terms.declared(one) for one in lineages_in_use(terms, state))


def declared_of(terms: Terms, lineages: Iterable[Lineage], spec: SubnetSpec) -> Declared:
    """The network of a subnet, whether it is in use or has retired.

    Raises:
        ValueError: the run never had it.
    """
    if not spec.network:
        return terms.first
    found = next((one for one in lineages if one.id == spec.network), None)
    if found is None:
        raise ValueError(f"subnet {spec.name!r} is of network {spec.network!r}, which the run never had")
    return terms.declared(found)


def price_of(terms: Terms, lineages: Iterable[Lineage], spec: SubnetSpec) -> Candidate:
    """What a subnet of any of the run's networks costs; memory is estimated from shapes."""
    return declared_of(terms, lineages, spec).price(spec)


def carried_by(terms: Terms, seats: Iterable[Seat], lineage: Lineage) -> tuple[str, ...]:
    """The clients whose budget has room for the largest size of a network, as shapes tell what that takes."""
    largest = terms.declared(lineage).candidates[-1]
    return tuple(
        seat.client_id
        for seat in seats
        if seat.offer.budget is not None and not why_not(largest, seat.offer.runtime, seat.offer.budget)
    )


def own_size(terms: Terms, lineages: tuple[Lineage, ...], seat: Seat) -> SubnetSpec | None:
    """The size that a client has declared, of a network in use; None where it is of none, or nothing is declared."""
    living = [one for one in all_lineages(terms, lineages) if one.living]
    if seat.offer.brought is None:
        return seat.offer.architecture if any(not one.id for one in living) else None
    found = (one for one in living if seat.offer.brought in one.members)
    return next((terms.declared(one).members[seat.offer.brought] for one in found), None)


def brought_anew(terms: Terms, state: RunState) -> tuple[AnyFamily, ...]:
    """The networks that clients of the round bring and that are in no union yet, in the order of the clients' ids."""
    seats = [seat for _, seat in sorted(state.seats.items()) if seat.offer.brought is not None]
    new = (seat.offer.brought for seat in seats if own_size(terms, state.lineages, seat) is None)
    return tuple(dict.fromkeys(one for one in new if one is not None))


def standing_for(terms: Terms, state: RunState, seat: Seat) -> Participant | None:
    """The client of an earlier seat with the subnet that is its own while it trains nothing.

    None where it had none, or the network of that has retired and the method names no other.
    """
    known = seat.participant
    if known is None or not state.lineages:  # most runs have one network
        return known if known is None or terms.network.is_path(known.spec) else None
    if terms.roles.networks.standing is None:
        return known if any(one.id == known.spec.network and one.living for one in state.lineages) else None
    networks = MappingProxyType({one.id: terms.declared(one).network for one in lineages_in_use(terms, state)})
    spec = terms.roles.networks.standing(
        StandingContext(
            seed=terms.config.seed,
            client=known,
            networks=networks,
            ready=partial(_ready, terms, state, seat),
            declared=own_size(terms, state.lineages, seat),
            memory=remembered(terms, state),
        )
    )
    if spec == known.spec:
        return known
    declared = declared_of(terms, state.lineages, spec)
    size = declared.network.size_of(spec)
    # By the name under which tables have it.
    size = next((one for one in declared.space if one.spec_id == size.spec_id), size)
    return replace(known, spec=spec, size=size)


def _ready(terms: Terms, state: RunState, seat: Seat, size: SubnetSpec) -> bool:
    """See `Standing.ready`."""
    if seat.size is not None and size.spec_id == seat.size.spec_id:  # whatever both are called
        return any(one.id == size.network and one.living for one in state.lineages)
    written = state.written.get(SizedProgram(size=size, target=seat.offer.runtime).key)
    if written is None or not counts(terms, state, written) or seat.offer.budget is None:
        return False
    facts = written.facts
    planned_bytes = planned_for(facts.planned_peak_bytes, facts.packings, seat.offer.packing_width)
    price = price_of(terms, state.lineages, size)
    return planned_bytes <= seat.offer.budget.memory_bytes and not why_not(price, seat.offer.runtime, seat.offer.budget)


def with_lineages(terms: Terms, state: RunState, lineages: tuple[Lineage, ...]) -> RunState:
    """The state with the networks that a round has left, without what is known of those that have retired."""
    if lineages == state.lineages:
        return state
    state = replace(state, lineages=lineages)
    living = {one.id for one in lineages_in_use(terms, state)}
    gone = [one for one in lineages if not one.living]
    keys = {CostRequest(target=target, lineage=one).key for one in gone for target in terms.config.targets}
    written = {key: one for key, one in state.written.items() if one.program.size.network in living}
    lost = state.written.keys() - written.keys()
    sizes = {SizedProgram(size=one.size, target=one.target).key for one in (state.written[key].program for key in lost)}
    live = replace(
        state.live,
        written_prices=MappingProxyType(
            {key: one for key, one in state.live.written_prices.items() if key not in lost}
        ),
        prices=MappingProxyType({key: one for key, one in state.live.prices.items() if key not in keys}),
    )
    return replace(
        state,
        pool=tuple(one for one in state.pool if one.spec.network in living),
        queue=tuple(one for one in state.queue if one.size.network in living),
        written=MappingProxyType(written),
        live=live,
        unfit=MappingProxyType({key: why for key, why in state.unfit.items() if _program_of(key) not in sizes}),
    )


def networks_told(before: Iterable[Lineage], after: Iterable[Lineage]) -> tuple[str, ...]:
    """What people are told of networks that have appeared or retired, a sentence each."""
    known = {one.id: one.living for one in before}
    told = list[str]()
    for one in after:
        if one.id and one.id not in known:
            why = f": {one.reason}" if one.reason else ""
            told.append(f"network {one.id} has appeared, {_grown(one)}{why}")
        if not one.living and known.get(one.id, True):
            told.append(f"{_called(one.id)} has retired")
    return tuple(told)


def readiness_told(terms: Terms, before: RunState, after: RunState) -> tuple[str, ...]:
    """What people are told of networks whose first program counts from the next turn on, a sentence each."""
    if (after.written is before.written and after.turn == before.turn) or not after.lineages:
        return ()
    known = _trainable(terms, before)
    born = [one.id for one in after.lineages if one.born_round and one.living]
    ready = _trainable(terms, after) - known
    return tuple(f"network {name} may be trained from the next round on" for name in born if name in ready)


def _trainable(terms: Terms, state: RunState) -> set[str]:
    """The networks that a program trains which counts in the next turn."""
    return {
        one.program.size.network
        for one in state.written.values()
        if one.facts.trainable and NEVER < counts_from(terms, one) <= state.turn + 1
    }


def _grown(lineage: Lineage) -> str:
    return "drawn anew" if lineage.parent is None else f"{lineage.map.TYPE} from {_called(lineage.parent)}"


def _called(network_id: str) -> str:
    return f"network {network_id}" if network_id else "the network that the run began with"


def _program_of(refusal: str) -> str:
    """The key of the program that a refusal is of, see `refusals`."""
    *_, target, spec_id = refusal.split("/")
    return f"{target}/{spec_id}"


NEVER = 0
"""In place of a turn: the program was not written in time for any."""


def counts_from(terms: Terms, written: WrittenProgram) -> int:
    """The turn from which a program counts; 0 for never."""
    return terms.config.programs_from.get(written.program.key, written.turn + 1)


def counts(terms: Terms, state: RunState, written: WrittenProgram) -> bool:
    """Whether a program may be given in this turn, as far as it is a matter of when it was written."""
    return NEVER < counts_from(terms, written) <= state.turn


def waits_for_programs(terms: Terms, state: RunState) -> bool:
    """Whether a round all of whose clients have answered stays open for programs that are being written."""
    told = terms.config.programs_from
    if told:
        return any(NEVER < told.get(one.key, NEVER) <= state.turn + 1 for one in state.queue)
    return bool(state.queue) and terms.config.strict and terms.roles.assigner.awaits_programs


def counting_turns(terms: Terms, state: RunState) -> Mapping[str, int]:
    """The turns from which programs count, by their keys, as `Run.programs_from` takes them."""
    found = {key: counts_from(terms, one) for key, one in state.written.items()}
    return dict(sorted({**{one.key: NEVER for one in state.queue}, **found}.items()))


def to_begin(terms: Terms, state: RunState) -> tuple[NetworksRequest, ...]:
    """What is to be made before the first round's clients are chosen; nothing where all is there."""
    begun = state.folded_round or state.lineages or state.live.begun_turn == state.turn
    if terms.roles.networks.begin is None or begun or not _answered(state):
        return ()
    return (NetworksRequest(turn=state.turn),)


def beginning_of(terms: Terms, state: RunState) -> tuple[Lineage, ...]:
    """The networks that the method begins with; the configured one retires before the first round.

    Args:
        terms: of the run.
        state: with the answers of the first round's clients.

    Returns:
        The lineages of the networks; none where the run begins with the configured one.

    Raises:
        ValueError: the method gives some that may not begin a run.
    """
    seats = _answered(state)
    found: tuple[Lineage, ...] = ()
    if terms.roles.networks.begin is not None:
        found = terms.roles.networks.begin(
            BeginContext(
                network=terms.network,
                rates=terms.config.rates,
                clients=tuple(seat.client_id for seat in seats),
                brought=MappingProxyType(
                    {seat.client_id: seat.offer.brought for seat in seats if seat.offer.brought is not None}
                ),
                carried_by=partial(
                    carried_by,
                    terms,
                    [
                        replace(seat, offer=replace(seat.offer, budget=seat.offer.lasting or seat.offer.budget))
                        for seat in seats
                    ],
                ),
            )
        )
    for lineage in found:
        _check(terms, lineage)
        terms.declared(lineage)  # which takes its time here, and none later
    (first,) = all_lineages(terms, ())
    return (replace(first, retired_round=0), *found) if found else ()


def begun_with(terms: Terms, state: RunState, request: NetworksRequest, lineages: tuple[Lineage, ...]) -> RunState:
    """The state in which the run begins so; one that has begun stays as it is.

    The configured network may have been given out before, in a turn that came to nothing; it leaves nothing behind.
    """
    if state.folded_round or state.lineages or request.turn != state.turn:
        return state
    state = with_lineages(terms, state, lineages)
    return replace(state, live=replace(state.live, begun_turn=state.turn))


def _answered(state: RunState) -> list[Seat]:
    return [seat for _, seat in sorted(state.seats.items()) if seat.stage == "answered"]


def _check(terms: Terms, lineage: Lineage) -> None:
    if not lineage.id or lineage.born_round or not lineage.living or not isinstance(lineage.map, Drawn):
        raise ValueError(
            f"a run is to begin with network {lineage.id!r}, but that must have an id, appear before the first round, "
            "be in use and have drawn weights"
        )
    config, first = lineage.config, terms.config.model
    if (config.input_shape, config.class_count) != (first.input_shape, first.class_count):
        raise ValueError(f"network {lineage.id!r} takes or tells something else than what the configuration describes")
