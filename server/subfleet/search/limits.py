"""Which of many estimated submodels stay within what one device can give a round, and how much of it they use."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.readings import Budget
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import compare

__all__ = ["UNTRAINABLE_BYTES", "Columns", "columns_of", "fitting", "utilisation"]

UNTRAINABLE_BYTES = 2**62
"""Stands in a column of memory for a submodel that the target cannot train, which no budget fits."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Cost estimates of many submodels on one target, one row each.

    Attributes:
        memory_bytes: `UNTRAINABLE_BYTES` if the target cannot train a submodel.
    """

    parameters: Integers
    weight_bytes: Integers
    update_bytes: Integers
    forward_macs: Integers
    memory_bytes: Integers

    @property
    def disk_bytes(self) -> Integers:
        """See `Taken.disk_bytes`."""
        return TRAINED_COPIES * self.weight_bytes


def columns_of(candidate: Candidate, target: str) -> Columns:
    """The one row of a submodel."""
    memory_bytes = candidate.training_memory_bytes.get(target, UNTRAINABLE_BYTES)
    return Columns(
        parameters=np.array([candidate.parameters]),
        weight_bytes=np.array([candidate.weight_bytes]),
        update_bytes=np.array([candidate.update_bytes]),
        forward_macs=np.array([candidate.forward_macs]),
        memory_bytes=np.array([memory_bytes]),
    )


def fitting(columns: Columns, limits: Budget) -> NDArray[np.bool_]:
    """Which rows are within every limit."""
    fits: NDArray[np.bool_] = columns.memory_bytes < UNTRAINABLE_BYTES
    for _, amount, most in compare(columns, columns.memory_bytes, limits):
        fits &= amount <= most
    return fits


def utilisation(columns: Columns, limits: Budget) -> NDArray[np.float64]:
    """The larger share of what each row takes of memory and of the links; at most 1 for rows that fit."""
    shares = columns.memory_bytes / max(limits.memory_bytes, 1)
    for limit, moved_bytes, link_bytes in compare(columns, columns.memory_bytes, limits):
        if limit == "link":
            np.maximum(shares, moved_bytes / max(link_bytes, 1), out=shares)
    return shares
