"""What the written program of a client's subnet plans to take on its device. Pure."""

from collections.abc import Callable, Sequence

from subfleet.protocol.chains import ChainRoom
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory import planned_for
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.written import ProgramFacts
from subfleet.search.candidates import lacking_operators

__all__ = ["operators_of", "planned_evaluation", "planned_for_seat"]


def operators_of(state: RunState, client_id: str) -> tuple[str, ...]:
    """The operators that a device's runtime lists; none where it lists none."""
    profile = state.profiles.get(client_id)
    return () if profile is None else profile.operators


def planned_for_seat(seat: Seat, facts: ProgramFacts, operators: Sequence[str]) -> tuple[int, bool]:
    """The planned peak in bytes, of a subspace its leanest path's; and whether an operator of it cannot run.

    Args:
        seat: with its subnet.
        facts: of the program.
        operators: that the device's runtime lists.
    """
    return _planned(seat, facts, operators, lambda room: room.least_peak_bytes)


def planned_evaluation(seat: Seat, facts: ProgramFacts, operators: Sequence[str]) -> tuple[int, bool]:
    """The same of evaluating: of a subspace, whatever path of it."""
    return _planned(seat, facts, operators, lambda room: room.evaluation_peak_bytes)


def _planned(
    seat: Seat, facts: ProgramFacts, operators: Sequence[str], peak_bytes: Callable[[ChainRoom], int]
) -> tuple[int, bool]:
    if facts.chain is None or seat.spec is None:
        return planned_for(facts.planned_peak_bytes, facts.packings, seat.offer.packing_width), False
    try:
        links = facts.chain.kept(dict(seat.spec.choices))
    except ProtocolError:  # the target lacks an operator of it
        return 0, True
    unfit = any(lacking_operators(one.needs, operators) for link in links for one in link.operators)
    return peak_bytes(facts.chain.room(links)), unfit
