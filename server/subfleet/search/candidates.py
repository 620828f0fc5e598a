"""Submodels that may be assigned, the budgets that they must fit, and what keeps a submodel from a client.

What fits is decided in one place, for one submodel and for columns of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TRAINING_MACS_PER_FORWARD

__all__ = ["Candidate"]

Limit = Literal["memory", "disk", "link", "compute", "runtime", "program"]
"""What keeps a size from a client: a part of its budget, a runtime that cannot run the size's program, or a program
that cannot be had or read."""
LIMITS: tuple[Limit, ...] = get_args(Limit)

_MOST = 2**60
"""The largest value of any part of a budget: what a message and the journal can carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A submodel that may be assigned, and its costs.

    Attributes:
        training_memory_bytes: by program target, the estimated growth of the device's process while it trains; a target
            that cannot train the submodel is missing. The plan of the exported program decides in the end.
        weight_bytes: of its weights, which travel to a device in each round; frozen ones travel once and do not count.
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


def order_candidates(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates from smallest to largest."""
    return tuple(sorted(candidates, key=lambda candidate: candidate.order))


def build_budget(
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


def limit_forward_macs(macs_per_s: float | None, training_s: float, sample_passes: int) -> int | None:
    """The multiply-accumulates that one sample's forward pass may take; None is no limit.

    Args:
        macs_per_s: multiply-accumulates of training that the device does in a second; None is unknown.
        training_s: seconds that it gives to the samples; 0 is no limit.
        sample_passes: samples, each counted as often as it is trained on.
    """
    if macs_per_s is None or not training_s:
        return None
    return int(min(macs_per_s * training_s / (TRAINING_MACS_PER_FORWARD * sample_passes), _MOST))


def list_lacking_operators(needed: Iterable[str], listed: Collection[str]) -> tuple[str, ...]:
    """The operators that a program calls and a runtime lacks, sorted; none if the runtime lists nothing."""
    return tuple(sorted(set(needed) - set(listed))) if listed else ()


def _link_bytes(rate_bps: float | None, communication_s: float) -> int | None:
    return None if rate_bps is None else int(min(rate_bps * communication_s / 8, _MOST))


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
