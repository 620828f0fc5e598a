"""Which of many priced subnets stay within what one device can give a round, and how much of it they use."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subfleet.protocol.readings import Budget
from subfleet.search.candidates import Candidate

__all__ = ["INFINITE_BYTES", "Columns", "columns_of", "fitting", "utilisation"]

INFINITE_BYTES = 2**62
"""The memory of a subnet on a runtime that cannot train it."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Prices of many subnets on one target, one row each."""

    parameters: Integers
    weight_bytes: Integers
    update_bytes: Integers
    forward_macs: Integers
    memory_bytes: Integers


def columns_of(candidate: Candidate, target: str) -> Columns:
    """The one row of a subnet."""
    memory_bytes = min(candidate.training_memory_bytes.get(target, INFINITE_BYTES), INFINITE_BYTES)
    return Columns(
        parameters=np.array([candidate.parameters]),
        weight_bytes=np.array([candidate.weight_bytes]),
        update_bytes=np.array([candidate.update_bytes]),
        forward_macs=np.array([candidate.forward_macs]),
        memory_bytes=np.array([memory_bytes]),
    )


def fitting(columns: Columns, limits: Budget) -> NDArray[np.bool_]:
    """Which rows are within every limit. The program is not counted: it moves once for many rounds."""
    fits = columns.memory_bytes <= min(limits.memory_bytes, INFINITE_BYTES - 1)
    for moved_bytes, link_bytes in _moved(columns, limits):
        fits &= moved_bytes <= link_bytes
    if limits.forward_macs is not None:
        fits &= columns.forward_macs <= limits.forward_macs
    return fits


def utilisation(columns: Columns, limits: Budget) -> NDArray[np.float64]:
    """The larger share of what each row takes of memory and of the links; at most 1 for rows that fit."""
    shares = columns.memory_bytes / max(limits.memory_bytes, 1)
    for moved_bytes, link_bytes in _moved(columns, limits):
        np.maximum(shares, moved_bytes / max(link_bytes, 1), out=shares)
    return shares


def _moved(columns: Columns, limits: Budget) -> tuple[tuple[Integers, int], ...]:
    """What each row moves over each link that has a limit, and that limit."""
    moved = ((columns.weight_bytes, limits.downlink_bytes), (columns.update_bytes, limits.uplink_bytes))
    return tuple((moved_bytes, link_bytes) for moved_bytes, link_bytes in moved if link_bytes is not None)
