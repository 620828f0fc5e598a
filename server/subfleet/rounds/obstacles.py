"""Obstacles to a task: the plan of its program, the client's disk and link, and its earlier refusals. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from subfleet.methods.assigner import AssignmentContext
from subfleet.protocol.chains import ChainMemory
from subfleet.protocol.disk import PLACED_COPIES, needed_bytes
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Refusal, RefusalReason
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import LEAST_LINK_BPS
from subfleet.protocol.task import Score, Task
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import ClientState, Lasts, RunState
from subfleet.search.candidates import Candidate, Limit, Obstacle, list_lacking_operators
from subfleet.search.queue import ProgramFacts


def get_operators(state: RunState, client_id: str) -> tuple[str, ...]:
    """The operators that a device's runtime lists; empty if it lists none."""
    profile = state.profiles.get(client_id)
    return () if profile is None else profile.operators


def plan_bytes(
    client: ClientState, facts: ProgramFacts, operators: Sequence[str], peak_bytes: Callable[[ChainMemory], int]
) -> int | None:
    """The planned peak of a client's submodel in bytes; None if the runtime cannot run one of its operators.

    Args:
        client: the client's state with its submodel.
        facts: facts about the program.
        operators: the operators that the device's runtime lists.
        peak_bytes: of a subspace, the peak that counts: `ChainMemory.least_peak_bytes` if it chooses the path itself.
    """
    if facts.chain is None or client.architecture is None:
        return facts.plan_for(client.offer.packing_width).planned_peak_bytes
    try:
        links = facts.chain.restrict(dict(client.architecture.choices))
    except ProtocolError:  # the target lacks an operator of it
        return None
    if any(list_lacking_operators(operator.needs, operators) for link in links for operator in link.operators):
        return None
    return peak_bytes(facts.chain.plan_memory(links))


def find_objection(context: RunContext, state: RunState, client: ClientState, task: Task) -> Limit | None:
    """The limit for which a device would refuse a task by its sizes; None if it would fetch the task."""
    if explain_disk(client, task):
        return "disk"
    downlink_bytes = client.offer.budget.downlink_bytes
    if downlink_bytes is None:
        return None
    rate_bps = max(8 * downlink_bytes / context.config.communication_s, LEAST_LINK_BPS)
    last = state.last.get(client.client_id)  # the device still has its last program
    there = set() if last is None or last.task is None else {program.blob for program in last.task.programs}
    fetched_bytes = sum(blob.size_bytes for blob in task.blobs if blob not in there)
    return "link" if 8 * fetched_bytes / rate_bps > task.deadline_s else None


def explain_disk(client: ClientState, task: Task) -> str:
    """Why a task does not fit a device's disk; empty if it does, or the disk is unknown."""
    most_bytes = client.offer.budget.disk_bytes
    taken_bytes = needed_bytes(task)
    if most_bytes is None or taken_bytes <= most_bytes:
        return ""
    return f"the task takes {taken_bytes} bytes of disk and the budget is {most_bytes}"


def select_models(client: ClientState, programs: Sequence[ProgramRef]) -> tuple[ProgramRef, ...]:
    """The inference models that fit a device's disk; the model for its own runtime comes first."""
    left_bytes = client.offer.budget.disk_bytes
    if left_bytes is None:
        return tuple(programs)
    targets = set[str]()
    for program in sorted(programs, key=lambda program: program.target != client.offer.runtime):
        taken_bytes = PLACED_COPIES * program.blob.size_bytes
        if taken_bytes <= left_bytes:
            targets.add(program.target)
            left_bytes -= taken_bytes
    return tuple(program for program in programs if program.target in targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalEffect:
    """The effect of a refusal.

    Attributes:
        limit: the limit that the task exceeds, so that a smaller task may do; None if no other size helps.
        lasts: whether the same task would be refused again.
    """

    limit: Limit | None
    lasts: Lasts


REFUSALS: Mapping[RefusalReason, RefusalEffect] = MappingProxyType(
    {
        "memory": RefusalEffect(limit="memory", lasts="passing"),
        "disk": RefusalEffect(limit="disk", lasts="passing"),
        "link": RefusalEffect(limit="link", lasts="passing"),
        "compute": RefusalEffect(limit="compute", lasts="passing"),
        "runtime": RefusalEffect(limit="runtime", lasts="lasting"),
        "program": RefusalEffect(limit="program", lasts="lasting"),
        "data": RefusalEffect(limit=None, lasts="lasting"),
        "diverged": RefusalEffect(limit=None, lasts="lasting"),
        "failed": RefusalEffect(limit=None, lasts="unclear"),
    }
)

LASTING_LIMITS: frozenset[Limit | None] = frozenset(
    effect.limit for effect in REFUSALS.values() if effect.limit is not None and effect.lasts == "lasting"
)
"""Limits of a program itself; the device is not given such a program again."""


def is_exhausted(question: AssignmentContext, only: Candidate | None = None) -> bool:
    """Whether every size has a lasting obstacle, so that no attempt can give the client a task.

    Args:
        question: the question to the method.
        only: the one size that the method would give.
    """
    unbounded = replace(question, below=None)
    return all(
        unbounded.find_exceeded(size) & LASTING_LIMITS for size in (question.candidates if only is None else (only,))
    )


_MOST = 10_000
"""Refusals that a run remembers; the oldest are dropped first."""


def record_unfit(state: RunState, client: ClientState, refusal: Refusal, why: str) -> RunState:
    """The state that remembers a refusal of the programs of a task.

    Args:
        state: the run's state.
        client: of the device, with its size, or the candidates that it was to score.
        refusal: the refusal of its task.
        why: the refusal in printable words.
    """
    limit = REFUSALS[refusal.reason].limit
    if limit is None or limit not in LASTING_LIMITS:
        return state
    scored = () if client.task is None or not isinstance(client.task.work, Score) else client.task.submodels
    own = () if client.size is None else (client.size,)
    sizes = tuple(candidate.architecture for candidate in scored) or own
    prefix = _name_programs(client.client_id, client.offer.runtime, scoring=bool(scored))
    keys = [f"{prefix}{size.architecture_id}" for size in sizes]
    unfit = {**state.unfit, **dict.fromkeys(keys, Obstacle(limit=limit, why=why))}
    for key in list(unfit)[: max(0, len(unfit) - _MOST)]:
        del unfit[key]
    return replace(state, unfit=MappingProxyType(unfit))


def list_unfit_sizes(state: RunState, client_id: str, target: str, *, scoring: bool = False) -> Mapping[str, Obstacle]:
    """By the size's id, why a device cannot run the program that trains it, or that scores it."""
    prefix = _name_programs(client_id, target, scoring=scoring)
    return {key.removeprefix(prefix): why for key, why in state.unfit.items() if key.startswith(prefix)}


def _name_programs(client_id: str, target: str, *, scoring: bool) -> str:
    """The beginning of the keys of `RunState.unfit`, before the size's id."""
    return f"{client_id}/score/{target}/" if scoring else f"{client_id}/{target}/"


def forget_refusals(state: RunState, client_id: str) -> RunState:
    """The state without a device's earlier refusals: it has restarted, perhaps with another runtime."""
    unfit = {key: why for key, why in state.unfit.items() if not key.startswith(f"{client_id}/")}
    disks = {name: size_bytes for name, size_bytes in state.disks.items() if name != client_id}
    failing = {name: record for name, record in state.failed_attempts.failing.items() if name != client_id}
    failed_attempts = replace(state.failed_attempts, failing=MappingProxyType(failing))
    return replace(state, unfit=MappingProxyType(unfit), disks=MappingProxyType(disks), failed_attempts=failed_attempts)
