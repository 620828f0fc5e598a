"""Which subnet fits a budget: a pure choice from a table of candidates, the same for every arrival order and cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from subfleet.protocol.readings import Budget, Reading
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Candidate", "budget_of", "fits", "ordered", "why_nothing_fits"]

_MOST_LINK_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A subnet that may be assigned, and what it costs.

    Attributes:
        training_memory_bytes: estimated growth of the device process while it trains, by program target; the
            exported program's own plan decides in the end.
        weight_bytes: of its weights; an update is as large.
        forward_macs: multiply-accumulates of one sample's forward pass.
    """

    spec: SubnetSpec
    parameters: int
    forward_macs: int
    weight_bytes: int
    training_memory_bytes: Mapping[str, int]

    @property
    def order(self) -> tuple[int, int, str]:
        """By parameters, then by multiply-accumulates, then by identity, so that no order is open."""
        return self.parameters, self.forward_macs, self.spec.spec_id


def ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Smallest to largest."""
    return tuple(sorted(candidates, key=lambda one: one.order))


def budget_of(reading: Reading, memory_budget_bytes: int, communication_s: float) -> Budget:
    """What one task may cost a device: its memory share, and the bytes its link moves in `communication_s` seconds."""
    return Budget(
        memory_bytes=memory_budget_bytes,
        downlink_bytes=_link_bytes(reading.downlink_bps, communication_s),
        uplink_bytes=_link_bytes(reading.uplink_bps, communication_s),
    )


def fits(candidate: Candidate, target: str, budget: Budget) -> bool:
    """Whether a candidate's estimated memory and its bytes are within a budget."""
    return (
        candidate.training_memory_bytes[target] <= budget.memory_bytes
        and (budget.downlink_bytes is None or candidate.weight_bytes <= budget.downlink_bytes)
        and (budget.uplink_bytes is None or candidate.weight_bytes <= budget.uplink_bytes)
    )


def why_nothing_fits(candidates: Sequence[Candidate], target: str, budget: Budget) -> str:
    """One sentence that names the smallest candidate's need beside what the device has."""
    smallest = candidates[0]
    need = smallest.training_memory_bytes[target]
    if need > budget.memory_bytes:
        return f"no subnet fits: the smallest needs {need} bytes of memory and the budget is {budget.memory_bytes}"
    return (
        f"no subnet fits: the smallest moves {smallest.weight_bytes} bytes each way and the link budget is "
        f"{budget.downlink_bytes} down and {budget.uplink_bytes} up"
    )


def _link_bytes(rate_bps: float | None, communication_s: float) -> int | None:
    # A device may claim any rate; a number that no message or journal can carry would end the run.
    return None if rate_bps is None else int(min(rate_bps * communication_s / 8, _MOST_LINK_BYTES))
