"""Which submodels fit a budget: a pure choice from a table of candidates, in any order of arrival."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.submodel import Architecture

__all__ = [
    "INFINITE_BYTES",
    "LIMITS",
    "TRAINING_MACS_PER_FORWARD",
    "Candidate",
    "Limit",
    "budget_of",
    "exceeded_limits",
    "forward_macs_of",
    "lacking_operators",
    "list_limits",
    "ordered",
    "why_not",
]

INFINITE_BYTES = 2**62
"""The memory of a submodel on a runtime that cannot train it: more than any budget."""
TRAINING_MACS_PER_FORWARD = 3
"""Multiply-accumulates of a training step over those of its forward pass: a backward pass takes twice as many."""
_MOST = 2**60
"""The largest value of any part of a budget: what a message and the journal can carry."""

Limit = Literal["memory", "disk", "link", "compute", "runtime", "program"]
"""What keeps a size from a client: a part of its budget, a runtime that cannot run the size's program, or a program
that cannot be fetched or read."""
LIMITS: tuple[Limit, ...] = get_args(Limit)

_REASONS: Mapping[Limit, str] = {
    "memory": "needs {memory_bytes} bytes of memory and the budget is {budget.memory_bytes}",
    "disk": "takes {candidate.disk_bytes} bytes of disk beside its program and the budget is {budget.disk_bytes}",
    "link": "moves {candidate.weight_bytes} bytes down and {candidate.update_bytes} up and the link budget is {down} "
    "down and {up} up",
    "compute": "takes {candidate.forward_macs} multiply-accumulates a sample and the budget is {budget.forward_macs}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A submodel that may be assigned, and its costs.

    Attributes:
        training_memory_bytes: by program target, the estimated growth of the device's process while it trains; the
            plan of the exported program decides in the end.
        weight_bytes: of its weights, which travel to a device.
        update_bytes: of an update, which travels back, at most, as its codec writes it.
        forward_macs: multiply-accumulates of one sample's forward pass.
    """

    architecture: Architecture
    parameters: int
    forward_macs: int
    weight_bytes: int
    update_bytes: int
    training_memory_bytes: Mapping[str, int]

    @property
    def order(self) -> tuple[int, int, Architecture]:
        """A total order: by parameters, then multiply-accumulates, then identity."""
        return self.parameters, self.forward_macs, self.architecture

    @property
    def disk_bytes(self) -> int:
        """Of the device's disk while it trains, without its program."""
        return TRAINED_COPIES * self.weight_bytes

    def memory_on(self, target: str) -> int:
        """The estimated memory on a program target; infinite if it cannot train the submodel."""
        return min(self.training_memory_bytes.get(target, INFINITE_BYTES), INFINITE_BYTES)


def ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates from smallest to largest."""
    return tuple(sorted(candidates, key=lambda candidate: candidate.order))


def budget_of(
    link: Reading | LogLow,
    memory_budget_bytes: int,
    *,
    communication_s: float,
    forward_macs: int | None = None,
    disk_bytes: int | None = None,
) -> Budget:
    """What one task may cost a device: its share of memory, and the bytes its link moves in `communication_s`."""
    return Budget(
        memory_bytes=memory_budget_bytes,
        downlink_bytes=_link_bytes(link.downlink_bps, communication_s),
        uplink_bytes=_link_bytes(link.uplink_bps, communication_s),
        forward_macs=forward_macs,
        disk_bytes=None if disk_bytes is None else min(disk_bytes, _MOST),
    )


def forward_macs_of(macs_per_s: float | None, training_s: float, sample_passes: int) -> int | None:
    """The multiply-accumulates that one sample's forward pass may take; None is no limit.

    Args:
        macs_per_s: multiply-accumulates of training that the device does in a second; None is unknown.
        training_s: seconds that it gives to the samples; 0 is no limit.
        sample_passes: samples, each counted as often as it is trained on.
    """
    if macs_per_s is None or not training_s:
        return None
    return int(min(macs_per_s * training_s / (TRAINING_MACS_PER_FORWARD * sample_passes), _MOST))


def list_limits(budget: Budget) -> tuple[tuple[Limit, str, int], ...]:
    """Each limited part of a budget: its name, the name of the cost that it limits, and the most that fits."""
    parts: tuple[tuple[Limit, str, int | None], ...] = (
        ("memory", "memory_bytes", min(budget.memory_bytes, INFINITE_BYTES - 1)),
        ("disk", "disk_bytes", budget.disk_bytes),
        ("link", "weight_bytes", budget.downlink_bytes),
        ("link", "update_bytes", budget.uplink_bytes),
        ("compute", "forward_macs", budget.forward_macs),
    )
    return tuple((limit, cost, most) for limit, cost, most in parts if most is not None)


def exceeded_limits(candidate: Candidate, target: str, budget: Budget) -> frozenset[Limit]:
    """The parts of a budget that a candidate exceeds; none if it fits."""
    return frozenset(_list_exceeded(candidate, target, budget))


def why_not(candidate: Candidate, target: str, budget: Budget) -> str:
    """The first part of a budget that a candidate exceeds, as a predicate such as "needs ..."; empty if it fits."""
    for limit in _list_exceeded(candidate, target, budget):
        down, up = ("unknown" if most is None else most for most in (budget.downlink_bytes, budget.uplink_bytes))
        memory_bytes = candidate.memory_on(target)
        return _REASONS[limit].format(candidate=candidate, budget=budget, memory_bytes=memory_bytes, down=down, up=up)
    return ""


def lacking_operators(needed: Iterable[str], listed: Collection[str]) -> tuple[str, ...]:
    """The operators that a program calls and a runtime lacks, sorted; none if the runtime lists nothing."""
    return tuple(sorted(set(needed) - set(listed))) if listed else ()


def _list_exceeded(candidate: Candidate, target: str, budget: Budget) -> list[Limit]:
    return [
        limit
        for limit, cost, most in list_limits(budget)
        if (candidate.memory_on(target) if cost == "memory_bytes" else getattr(candidate, cost)) > most
    ]


def _link_bytes(rate_bps: float | None, communication_s: float) -> int | None:
    return None if rate_bps is None else int(min(rate_bps * communication_s / 8, _MOST))
