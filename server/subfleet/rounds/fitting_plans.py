"""What the written program of a client's subnet plans to take on its device. Pure."""

from collections.abc import Sequence

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory import planned_for
from subfleet.rounds.state import Seat
from subfleet.rounds.written import ProgramFacts
from subfleet.search.candidates import lacking_operators

__all__ = ["planned_for_seat"]


def planned_for_seat(seat: Seat, facts: ProgramFacts, operators: Sequence[str]) -> tuple[int, bool]:
    """The planned peak in bytes, of a subspace its leanest path's; and whether an operator of it cannot run.

    Args:
        seat: with its subnet.
        facts: of the program.
        operators: that the device's runtime lists.
    """
    if facts.chain is None or seat.spec is None:
        return planned_for(facts.planned_peak_bytes, facts.packings, seat.packing_width), False
    try:
        links = facts.chain.kept(dict(seat.spec.choices))
    except ProtocolError:  # the target lacks an operator of it
        return 0, True
    unfit = any(lacking_operators(one.needs, operators) for link in links for one in link.operators)
    return facts.chain.room(links).least_peak_bytes, unfit
