"""Submodels that may be assigned, with their costs; and the budgets that these must fit."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.submodel import Architecture

__all__ = ["Candidate"]

TRAINING_MACS_PER_FORWARD = 3
"""Multiply-accumulates of a training step over those of its forward pass: a backward pass takes twice as many."""
_MOST = 2**60
"""The largest value of any part of a budget: what a message and the journal can carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A submodel that may be assigned, and its costs.

    Attributes:
        training_memory_bytes: by program target, the estimated growth of the device's process while it trains; a target
            that cannot train the submodel is missing. The plan of the exported program decides in the end.
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
