"""What tasks take of a device's disk and link, by their sizes: as the device weighs them before it fetches. Pure."""

from collections.abc import Sequence

from subfleet.protocol.disk import PLACED_COPIES, needed_bytes
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import LEAST_LINK_BPS
from subfleet.protocol.task import Task
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.search.fitting import Limit

__all__ = ["beyond_disk", "models_with_room", "objection"]


def objection(terms: Terms, state: RunState, seat: Seat, task: Task) -> Limit | None:
    """What a device would refuse a task for by its sizes; None where it would fetch it."""
    if beyond_disk(seat, task):
        return "disk"
    return "link" if _too_slow(terms, state, seat, task) else None


def beyond_disk(seat: Seat, task: Task) -> str:
    """Why a task does not fit a device's disk; empty where it does, or nothing is known of the disk."""
    most_bytes = None if seat.offer.budget is None else seat.offer.budget.disk_bytes
    taken_bytes = needed_bytes(task)
    if most_bytes is None or taken_bytes <= most_bytes:
        return ""
    return f"the task takes {taken_bytes} bytes of disk and the budget is {most_bytes}"


def models_with_room(seat: Seat, programs: Sequence[ProgramRef]) -> tuple[ProgramRef, ...]:
    """Of a device's inference models, those for which its disk has room: its own runtime's comes first."""
    left_bytes = None if seat.offer.budget is None else seat.offer.budget.disk_bytes
    if left_bytes is None:
        return tuple(programs)
    kept = set[str]()
    for program in sorted(programs, key=lambda one: one.target != seat.offer.runtime):
        taken_bytes = PLACED_COPIES * program.blob.size_bytes
        if taken_bytes <= left_bytes:
            kept.add(program.target)
            left_bytes -= taken_bytes
    return tuple(program for program in programs if program.target in kept)


def _too_slow(terms: Terms, state: RunState, seat: Seat, task: Task) -> bool:
    """Whether a task cannot come before it ends; the program that the device had last is there already."""
    if seat.offer.budget is None or seat.offer.budget.downlink_bytes is None:
        return False
    rate_bps = max(8 * seat.offer.budget.downlink_bytes / terms.config.communication_s, LEAST_LINK_BPS)
    last = state.last.get(seat.client_id)
    there = set() if last is None or last.task is None else {program.blob for program in last.task.programs}
    fetched_bytes = sum(blob.size_bytes for blob in task.blobs if blob not in there)
    return 8 * fetched_bytes / rate_bps > task.deadline_s
