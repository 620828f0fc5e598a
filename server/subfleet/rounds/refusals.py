"""What refusals lead to, by their reason, and the programs that a device has said its runtime cannot run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from subfleet.methods.assigner import AssignmentContext
from subfleet.protocol.messages import Refusal, RefusalReason
from subfleet.protocol.task import Score
from subfleet.rounds.state import ClientState, Lasts, RunState
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import Limit, Obstacle
from subfleet.search.queue import SizedProgram

__all__ = [
    "LASTING_LIMITS",
    "REFUSALS",
    "Course",
    "forgiven",
    "nothing_left",
    "unfit_sizes",
    "unscorable_sizes",
    "with_unfit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What follows from a refusal.

    Attributes:
        limit: what kept the task from the device, so that one which takes less of it may be done; None where no other
            size changes anything.
        lasts: whether the same task would be refused again.
        of_program: whether it says something of the program, which the device is not given again.
    """

    limit: Limit | None
    lasts: Lasts
    of_program: bool = False


REFUSALS: Mapping[RefusalReason, Course] = MappingProxyType(
    {
        "memory": Course(limit="memory", lasts="passing"),
        "disk": Course(limit="disk", lasts="passing"),
        "link": Course(limit="link", lasts="passing"),
        "compute": Course(limit="compute", lasts="passing"),
        "runtime": Course(limit="runtime", lasts="lasting", of_program=True),
        "program": Course(limit="program", lasts="lasting", of_program=True),
        "data": Course(limit=None, lasts="lasting"),
        "diverged": Course(limit=None, lasts="lasting"),
        "failed": Course(limit=None, lasts="unclear"),
    }
)

LASTING_LIMITS: frozenset[Limit] = frozenset(
    course.limit for course in REFUSALS.values() if course.limit is not None and course.lasts == "lasting"
)


def nothing_left(ask: AssignmentContext, only: Candidate | None = None) -> bool:
    """Whether every size is kept from a client by what lasts, so that no attempt has anything for it.

    Args:
        ask: what the method was asked for the client; the sizes below one that was too large are no others.
        only: the one size that the method would give it.
    """
    asked = replace(ask, below=None)
    return all(asked.exceeded(one) & LASTING_LIMITS for one in (ask.candidates if only is None else (only,)))


_SCORE = "score"
"""Kind of the programs that score a size, which are others than those that train it."""
_MOST = 10_000
"""Refusals that a run remembers; the oldest go first."""


def with_unfit(state: RunState, client: ClientState, refusal: Refusal, why: str) -> RunState:
    """The state with what a refusal says of the programs of its task.

    Args:
        state: of the run.
        client: of the device, with the size that it was given, or the candidates that it was to score.
        refusal: of its task.
        why: the refusal in words that may be shown.
    """
    course = REFUSALS[refusal.reason]
    if course.limit is None or not course.of_program:
        return state
    kept = {**state.unfit, **dict.fromkeys(_keys(client), Obstacle(limit=course.limit, why=why))}
    for key in list(kept)[: max(0, len(kept) - _MOST)]:
        del kept[key]
    return replace(state, unfit=MappingProxyType(kept))


def _keys(client: ClientState) -> tuple[str, ...]:
    if client.task is not None and isinstance(client.task.work, Score):
        programs = (SizedProgram(size=one.architecture, target=client.offer.runtime) for one in client.task.submodels)
        return tuple(f"{client.client_id}/{_SCORE}/{program.key}" for program in programs)
    return (
        ()
        if client.size is None
        else (f"{client.client_id}/{SizedProgram(size=client.size, target=client.offer.runtime).key}",)
    )


def unfit_sizes(state: RunState, client_id: str, target: str) -> Mapping[str, Obstacle]:
    """By size's id, why a device cannot run the program that trains it."""
    return _with_prefix(state, f"{client_id}/{target}/")


def unscorable_sizes(state: RunState, client_id: str, target: str) -> Mapping[str, Obstacle]:
    """By size's id, why a device cannot run the program that scores it."""
    return _with_prefix(state, f"{client_id}/{_SCORE}/{target}/")


def _with_prefix(state: RunState, prefix: str) -> Mapping[str, Obstacle]:
    return {key.removeprefix(prefix): why for key, why in state.unfit.items() if key.startswith(prefix)}


def forgiven(state: RunState, client_id: str) -> RunState:
    """The state in which a device may be given anything again: it has started anew, maybe with another runtime."""
    kept = {key: why for key, why in state.unfit.items() if not key.startswith(f"{client_id}/")}
    if len(kept) < len(state.unfit):
        state = replace(state, unfit=MappingProxyType(kept))
    if client_id in state.disks:
        disks = {name: size_bytes for name, size_bytes in state.disks.items() if name != client_id}
        state = replace(state, disks=MappingProxyType(disks))
    if client_id in state.tries.failing:
        failing = {name: one for name, one in state.tries.failing.items() if name != client_id}
        state = replace(state, tries=replace(state.tries, failing=MappingProxyType(failing)))
    return state
