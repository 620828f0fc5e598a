"""The networks that a run begins with, where its method goes by what the first clients have and can give. Pure."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from subfleet.elastic.lineage import Drawn, Lineage
from subfleet.methods.evolving import Beginning
from subfleet.rounds.networks import all_lineages, carried_by
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms

__all__ = ["begun_with"]


def begun_with(terms: Terms, state: RunState) -> RunState:
    """The state with the networks that the method begins with; the configured one retires before the first round.

    Raises:
        ValueError: the method gives none that may begin a run.
    """
    seats = [seat for _, seat in sorted(state.seats.items()) if seat.stage == "answered"]
    if terms.policies.begin is None or state.folded_round or state.lineages or not seats:
        return state
    lineages = terms.policies.begin(
        Beginning(
            network=terms.network,
            rates=terms.config.rates,
            clients=tuple(seat.client_id for seat in seats),
            brought=MappingProxyType({seat.client_id: seat.brought for seat in seats if seat.brought is not None}),
            carried_by=partial(
                carried_by, terms, [replace(seat, budget=seat.lasting or seat.budget) for seat in seats]
            ),
        )
    )
    if not lineages:
        return state
    for lineage in lineages:
        _check(terms, lineage)
    (first,) = all_lineages(terms, ())
    return replace(state, lineages=(replace(first, retired_round=0), *lineages))


def _check(terms: Terms, lineage: Lineage) -> None:
    if not lineage.id or lineage.born_round or not lineage.living or not isinstance(lineage.map, Drawn):
        raise ValueError(
            f"a run is to begin with network {lineage.id!r}, but that must have an id, appear before the first round, "
            "be in use and have drawn weights"
        )
    config, first = lineage.config, terms.config.model
    if (config.input_shape, config.class_count) != (first.input_shape, first.class_count):
        raise ValueError(f"network {lineage.id!r} takes or tells something else than what the configuration describes")
