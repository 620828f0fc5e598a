"""The networks that a run begins with, where its method goes by what the first clients have and can give. Pure."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from subfleet.elastic.lineage import Drawn, Lineage
from subfleet.methods.run_networks import BeginContext
from subfleet.rounds.networks import all_lineages, carried_by, with_lineages
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import NetworksRequest

__all__ = ["beginning_of", "begun_with", "to_begin"]


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
