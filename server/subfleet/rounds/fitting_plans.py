"""What the written program of a client's subnet plans to take on its device. Pure."""

from collections.abc import Sequence

from subfleet.protocol.chains import Chain, ChainRoom
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory import planned_for
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.written import ProgramFacts
from subfleet.search.candidates import lacking_operators

__all__ = ["operators_of", "planned_evaluation", "planned_for_seat"]


def operators_of(state: RunState, client_id: str) -> tuple[str, ...]:
    """The operators that a device's runtime lists; none where it lists none."""
    member = state.members.get(client_id)
    return () if member is None or member.profile is None else member.profile.operators


def planned_for_seat(seat: Seat, facts: ProgramFacts, operators: Sequence[str]) -> tuple[int, bool]:
    """The planned peak in bytes, of a subspace its leanest path's; and whether an operator of it cannot run.

    Args:
        seat: with its subnet.
        facts: of the program.
        operators: that the device's runtime lists.
    """
    if facts.chain is None or seat.spec is None:
        return planned_for(facts.planned_peak_bytes, facts.packings, seat.packing_width), False
    room = _room(facts.chain, seat.spec, operators)
    return (0, True) if room is None else (room.least_peak_bytes, False)


def planned_evaluation(seat: Seat, facts: ProgramFacts, operators: Sequence[str]) -> tuple[int, bool]:
    """The same of evaluating: of a subspace, whatever path of it."""
    if facts.chain is None or seat.spec is None:
        return planned_for(facts.planned_peak_bytes, facts.packings, seat.packing_width), False
    room = _room(facts.chain, seat.spec, operators)
    return (0, True) if room is None else (room.evaluation_peak_bytes, False)


def _room(chain: Chain, spec: SubnetSpec, operators: Sequence[str]) -> ChainRoom | None:
    """What a subspace's paths take; None where the target, or the device's runtime, lacks an operator of it."""
    try:
        links = chain.kept(dict(spec.choices))
    except ProtocolError:
        return None
    unfit = any(lacking_operators(one.needs, operators) for link in links for one in link.operators)
    return None if unfit else chain.room(links)
