"""Programs that a device has said its runtime cannot run, so that it is not given them again. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.methods.assigner import Unfit
from subfleet.protocol.messages import Refusal
from subfleet.protocol.task import Score
from subfleet.rounds.reasons import REFUSALS
from subfleet.rounds.state import RunState, Seat
from subfleet.search.queue import SizedProgram

__all__ = ["forgiven", "unfit_sizes", "unscorable_sizes", "with_unfit"]

_SCORE = "score"
"""Kind of the programs that score a size, which are others than those that train it."""
_MOST = 10_000
"""Refusals that a run remembers; the oldest go first."""


def with_unfit(state: RunState, seat: Seat, refusal: Refusal, why: str) -> RunState:
    """The state with what a refusal says of the programs of its task.

    Args:
        state: of the run.
        seat: of the device, with the size that it was given, or the candidates that it was to score.
        refusal: of its task.
        why: the refusal in words that may be shown.
    """
    course = REFUSALS[refusal.reason]
    if course.limit is None or not course.of_program:
        return state
    kept = {**state.unfit, **dict.fromkeys(_keys(seat), Unfit(limit=course.limit, why=why))}
    for key in list(kept)[: max(0, len(kept) - _MOST)]:
        del kept[key]
    return replace(state, unfit=MappingProxyType(kept))


def _keys(seat: Seat) -> tuple[str, ...]:
    if seat.task is not None and isinstance(seat.task.work, Score):
        programs = (SizedProgram(size=one.spec, target=seat.offer.runtime) for one in seat.task.work.candidates)
        return tuple(f"{seat.client_id}/{_SCORE}/{program.key}" for program in programs)
    return (
        ()
        if seat.size is None
        else (f"{seat.client_id}/{SizedProgram(size=seat.size, target=seat.offer.runtime).key}",)
    )


def unfit_sizes(state: RunState, client_id: str, target: str) -> Mapping[str, Unfit]:
    """By size's id, why a device cannot run the program that trains it."""
    return _with_prefix(state, f"{client_id}/{target}/")


def unscorable_sizes(state: RunState, client_id: str, target: str) -> Mapping[str, Unfit]:
    """By size's id, why a device cannot run the program that scores it."""
    return _with_prefix(state, f"{client_id}/{_SCORE}/{target}/")


def _with_prefix(state: RunState, prefix: str) -> Mapping[str, Unfit]:
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
