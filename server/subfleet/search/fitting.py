"""Whether a submodel fits a budget, and what keeps it from a client: one rule, for one submodel and for columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from subfleet.protocol.readings import Budget
from subfleet.search.candidates import Candidate, list_lacking_operators
from subfleet.search.queue import ProgramFacts

Limit = Literal["memory", "disk", "link", "compute", "runtime", "program"]
"""What keeps a size from a client: a part of its budget, a runtime that cannot run the size's program, or a program
that cannot be had or read."""
LIMITS: tuple[Limit, ...] = get_args(Limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why a client is not given a size.

    Attributes:
        limit: the limit that the size exceeds.
        why: the rest of a sentence that begins with the size.
    """

    limit: Limit
    why: str


def list_limits(budget: Budget) -> tuple[tuple[Limit, str, int], ...]:
    """Each limited part of a budget: its name, the name of the cost that it limits, and the most that fits."""
    parts: tuple[tuple[Limit, str, int | None], ...] = (
        ("memory", "memory_bytes", budget.memory_bytes),
        ("disk", "disk_bytes", budget.disk_bytes),
        ("link", "weight_bytes", budget.downlink_bytes),
        ("link", "update_bytes", budget.uplink_bytes),
        ("compute", "forward_macs", budget.forward_macs),
    )
    return tuple((limit, cost, most) for limit, cost, most in parts if most is not None)


def fits(candidate: Candidate, target: str, budget: Budget) -> bool:
    """Whether a submodel fits a budget, by its cost estimate."""
    return next(find_obstacles(candidate, target, budget), None) is None


def find_obstacles(candidate: Candidate, target: str, budget: Budget) -> Iterator[Obstacle]:
    """What keeps a submodel from a device, by its cost estimate: nothing if it fits."""
    memory_bytes = candidate.training_memory_bytes.get(target)
    if memory_bytes is None:
        yield Obstacle(limit="runtime", why=f"cannot be trained on {target!r}")
    for limit, cost, most in list_limits(budget):
        amount = memory_bytes or 0 if cost == "memory_bytes" else getattr(candidate, cost)
        if amount > most:
            yield Obstacle(limit=limit, why=_describe(limit, candidate, amount, budget))


def find_program_obstacles(
    facts: ProgramFacts, candidate: Candidate, target: str, budget: Budget, operators: Sequence[str]
) -> Iterator[Obstacle]:
    """What keeps a submodel from a device, by the program that trains it.

    Args:
        facts: of the program, with its memory as planned for the device.
        candidate: the submodel.
        target: of the program.
        budget: of the device.
        operators: that the device's runtime has; empty if it lists none.
    """
    if lacking := list_lacking_operators(facts.operators, operators):
        yield Obstacle(limit="runtime", why=f"calls {', '.join(lacking)}, which the device's runtime {target!r} lacks")
    if facts.planned_peak_bytes is None:
        why = f"cannot be trained on {target!r}" + (f": {facts.problem}" if facts.problem else "")
        yield Obstacle(limit="runtime", why=why)
    elif facts.planned_peak_bytes > budget.memory_bytes:
        why = f"needs {facts.planned_peak_bytes} bytes of memory and the budget is {budget.memory_bytes}"
        yield Obstacle(limit="memory", why=why)
    disk_bytes = candidate.disk_bytes + facts.program_bytes
    if budget.disk_bytes is not None and disk_bytes > budget.disk_bytes:
        yield Obstacle(limit="disk", why=f"takes {disk_bytes} bytes of disk and the budget is {budget.disk_bytes}")


def _describe(limit: Limit, candidate: Candidate, amount: int, budget: Budget) -> str:
    if limit == "memory":
        return f"needs {amount} bytes of memory and the budget is {budget.memory_bytes}"
    if limit == "disk":
        return f"takes {amount} bytes of disk beside its program and the budget is {budget.disk_bytes}"
    if limit == "compute":
        return f"takes {amount} multiply-accumulates a sample and the budget is {budget.forward_macs}"
    down, up = ("unknown" if most is None else str(most) for most in (budget.downlink_bytes, budget.uplink_bytes))
    moved = f"{candidate.weight_bytes} bytes down and {candidate.update_bytes} up"
    return f"moves {moved} and the link budget is {down} down and {up} up"
