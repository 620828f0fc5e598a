"""What one device can give a round in every currency, and which of many priced subnets stay within it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["INFINITE_BYTES", "TRAINING_MACS_PER_FORWARD", "Columns", "Limits", "fitting", "utilisation"]

INFINITE_BYTES = 2**62
"""The memory of a subnet on a runtime that cannot train it."""
TRAINING_MACS_PER_FORWARD = 3
"""A training step is a forward pass and a backward pass of twice its multiply-accumulates."""

_FOREVER_S = 1e30

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one device can give one round. None is no limit, or where it is a rate, no time.

    Bytes are counted for each direction by itself: a round moves the subnet's weights down and an update of the same
    size up, each against the budget of its own link. The program is not counted: it moves once for many rounds.

    Attributes:
        memory_bytes: growth of the device process's memory that training may cause.
        downlink_bytes: that may travel to the device in the round.
        uplink_bytes: that may travel from the device in the round.
        train_macs: multiply-accumulates that training may take in the round.
        deadline_s: seconds in which weights travel down, training ends and the update travels up, one after the other.
        downlink_bps: link rate towards the device, bits per second.
        uplink_bps: link rate from the device, bits per second.
        macs_per_s: multiply-accumulates that the device trains with in a second.
        sample_passes: samples that it trains on in the round, each counted as often as it is seen.
    """

    memory_bytes: int
    downlink_bytes: int | None = None
    uplink_bytes: int | None = None
    train_macs: int | None = None
    deadline_s: float | None = None
    downlink_bps: float | None = None
    uplink_bps: float | None = None
    macs_per_s: float | None = None
    sample_passes: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}, but must be 0 or more")

    @property
    def round_macs_per_forward(self) -> int:
        """Multiply-accumulates of a round for each one of a single sample's forward pass."""
        return TRAINING_MACS_PER_FORWARD * self.sample_passes

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that a byte of weights costs a round: it travels down, and its update up."""
        return _seconds_each(self.downlink_bps, 8) + _seconds_each(self.uplink_bps, 8)

    @property
    def seconds_per_mac(self) -> float:
        """Seconds that training costs a round for each multiply-accumulate of one sample's forward pass."""
        return _seconds_each(self.macs_per_s, self.round_macs_per_forward)


def _seconds_each(rate: float | None, units: int) -> float:
    if rate is None or not units:
        return 0.0
    # A link that stands still never delivers.
    return min(units / rate, _FOREVER_S) if rate > 0 else _FOREVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Prices of many subnets on one target, one row each."""

    parameters: Integers
    weight_bytes: Integers
    forward_macs: Integers
    memory_bytes: Integers


def fitting(columns: Columns, limits: Limits) -> NDArray[np.bool_]:
    """Which rows are within every limit."""
    fits = columns.memory_bytes <= min(limits.memory_bytes, INFINITE_BYTES - 1)
    for link_bytes in (limits.downlink_bytes, limits.uplink_bytes):
        if link_bytes is not None:
            fits &= columns.weight_bytes <= link_bytes
    if limits.train_macs is not None and limits.sample_passes:
        # Divided rather than multiplied: the product may be beyond what a column holds.
        fits &= columns.forward_macs <= limits.train_macs // limits.round_macs_per_forward
    if limits.deadline_s is not None:
        seconds = columns.weight_bytes * limits.seconds_per_byte + columns.forward_macs * limits.seconds_per_mac
        fits &= seconds <= limits.deadline_s
    return fits


def utilisation(columns: Columns, limits: Limits) -> NDArray[np.float64]:
    """The larger share of what each row takes of memory and of the links; at most 1 for rows that fit."""
    shares = columns.memory_bytes / max(limits.memory_bytes, 1)
    links = [link for link in (limits.downlink_bytes, limits.uplink_bytes) if link is not None]
    if links:
        np.maximum(shares, columns.weight_bytes / max(min(links), 1), out=shares)
    return shares
