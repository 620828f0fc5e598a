"""Which submodel fits a budget: a pure choice from a table of candidates, whatever the arrival order and cache."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.submodel import Architecture

__all__ = [
    "TRAINING_MACS_PER_FORWARD",
    "Candidate",
    "budget_of",
    "forward_macs_of",
    "lacking_operators",
    "ordered",
]

TRAINING_MACS_PER_FORWARD = 3
"""A training step is a forward pass and a backward pass of twice its multiply-accumulates."""

_MOST = 2**60
"""Of any part of a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A submodel that may be assigned, and what it costs.

    Attributes:
        training_memory_bytes: estimated growth of the device process while it trains, by program target; a target that
            cannot train the submodel is missing. The exported program's own plan decides in the end.
        weight_bytes: of its weights, which travel to a device.
        update_bytes: of an update, which travels back, as its codec writes it at most densely.
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
        """By parameters, then by multiply-accumulates, then by identity, so that no order is open."""
        return self.parameters, self.forward_macs, self.architecture

    @property
    def disk_bytes(self) -> int:
        """Of the device's disk while it trains, without its program."""
        return TRAINED_COPIES * self.weight_bytes


def ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Smallest to largest."""
    return tuple(sorted(candidates, key=lambda one: one.order))


def budget_of(
    link: Reading | LogLow,
    memory_budget_bytes: int,
    *,
    communication_s: float,
    forward_macs: int | None = None,
    disk_bytes: int | None = None,
) -> Budget:
    """What one task may cost a device: its memory share, and the bytes its link moves in `communication_s` seconds."""
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
        macs_per_s: multiply-accumulates that the device trains with in a second; None is unknown.
        training_s: seconds that it gives to so many samples; 0 is no limit.
        sample_passes: samples, each as often as it is trained on.
    """
    if macs_per_s is None or not training_s:
        return None
    return int(min(macs_per_s * training_s / (TRAINING_MACS_PER_FORWARD * sample_passes), _MOST))


def lacking_operators(needed: Iterable[str], listed: Collection[str]) -> tuple[str, ...]:
    """Operators that a program calls and a runtime lacks, sorted; none where the runtime lists nothing."""
    return tuple(sorted(set(needed) - set(listed))) if listed else ()


def _link_bytes(rate_bps: float | None, communication_s: float) -> int | None:
    # A device may claim any rate; a number that no message or journal can carry would end the run.
    return None if rate_bps is None else int(min(rate_bps * communication_s / 8, _MOST))
