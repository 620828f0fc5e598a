"""Whether what a client is to be given fits it: the plan of its program, its disk and its link. Pure."""

from collections.abc import Callable, Sequence

from subfleet.protocol.chains import ChainRoom
from subfleet.protocol.disk import PLACED_COPIES, needed_bytes
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import LEAST_LINK_BPS
from subfleet.protocol.task import Task
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import ClientState, RunState
from subfleet.search.candidates import lacking_operators
from subfleet.search.fitting import Limit
from subfleet.search.queue import ProgramFacts

__all__ = ["beyond_disk", "models_with_room", "objection", "operators_of", "plan_bytes"]


def operators_of(state: RunState, client_id: str) -> tuple[str, ...]:
    """The operators that a device's runtime lists; none where it lists none."""
    profile = state.profiles.get(client_id)
    return () if profile is None else profile.operators


def plan_bytes(
    client: ClientState, facts: ProgramFacts, operators: Sequence[str], peak_bytes: Callable[[ChainRoom], int]
) -> int | None:
    """The planned peak of a client's submodel in bytes; None if the runtime cannot run an operator of it.

    Args:
        client: with its submodel.
        facts: of the program.
        operators: that the device's runtime lists.
        peak_bytes: of a subspace, the peak that counts: `ChainRoom.least_peak_bytes` if it chooses the path itself.
    """
    if facts.chain is None or client.architecture is None:
        return facts.planned_for(client.offer.packing_width).planned_peak_bytes
    try:
        links = facts.chain.kept(dict(client.architecture.choices))
    except ProtocolError:  # the target lacks an operator of it
        return None
    if any(lacking_operators(one.needs, operators) for link in links for one in link.operators):
        return None
    return peak_bytes(facts.chain.room(links))


def objection(context: RunContext, state: RunState, client: ClientState, task: Task) -> Limit | None:
    """What a device would refuse a task for by its sizes; None where it would fetch it."""
    if beyond_disk(client, task):
        return "disk"
    return "link" if _too_slow(context, state, client, task) else None


def beyond_disk(client: ClientState, task: Task) -> str:
    """Why a task does not fit a device's disk; empty where it does, or nothing is known of the disk."""
    most_bytes = None if client.offer.budget is None else client.offer.budget.disk_bytes
    taken_bytes = needed_bytes(task)
    if most_bytes is None or taken_bytes <= most_bytes:
        return ""
    return f"the task takes {taken_bytes} bytes of disk and the budget is {most_bytes}"


def models_with_room(client: ClientState, programs: Sequence[ProgramRef]) -> tuple[ProgramRef, ...]:
    """Of a device's inference models, those for which its disk has room: its own runtime's comes first."""
    left_bytes = None if client.offer.budget is None else client.offer.budget.disk_bytes
    if left_bytes is None:
        return tuple(programs)
    kept = set[str]()
    for program in sorted(programs, key=lambda one: one.target != client.offer.runtime):
        taken_bytes = PLACED_COPIES * program.blob.size_bytes
        if taken_bytes <= left_bytes:
            kept.add(program.target)
            left_bytes -= taken_bytes
    return tuple(program for program in programs if program.target in kept)


def _too_slow(context: RunContext, state: RunState, client: ClientState, task: Task) -> bool:
    """Whether a task cannot come before it ends; the program that the device had last is there already."""
    if client.offer.budget is None or client.offer.budget.downlink_bytes is None:
        return False
    rate_bps = max(8 * client.offer.budget.downlink_bytes / context.config.communication_s, LEAST_LINK_BPS)
    last = state.last.get(client.client_id)
    there = set() if last is None or last.task is None else {program.blob for program in last.task.programs}
    fetched_bytes = sum(blob.size_bytes for blob in task.blobs if blob not in there)
    return 8 * fetched_bytes / rate_bps > task.deadline_s
