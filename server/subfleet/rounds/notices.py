"""What a device is told that gets no task in a round: why, as a receipt of its telemetry with a reason. Pure.

Nothing answers it, so it is said again with every heartbeat of the device while the round is open.
"""

from subfleet.protocol.messages import Receipt
from subfleet.rounds.actions import Reply
from subfleet.rounds.state import RunState, Seat

__all__ = ["skip_notice", "skip_notices"]


def skip_notice(seat: Seat | None) -> tuple[Reply, ...]:
    """What the client of a seat is told of it; nothing where it takes part or has told nothing."""
    if seat is None or seat.stage != "skipped" or not seat.offer.telemetry_id:
        return ()
    receipt = Receipt(
        of=seat.offer.telemetry_id,
        status="accepted",
        reason=seat.reason,
        message_id=f"skipped/{seat.offer.telemetry_id}",
    )
    return (Reply(client_id=seat.client_id, receipt=receipt),)


def skip_notices(before: RunState, after: RunState) -> tuple[Reply, ...]:
    """What clients are told whose seats a step has skipped."""
    if after.seats is before.seats:
        return ()
    new = (seat for name, seat in after.seats.items() if seat is not before.seats.get(name))
    return tuple(notice for seat in new for notice in skip_notice(seat))
