"""A device's resources at one moment: the record of logs, telemetry and budgets."""

from dataclasses import dataclass, field
from typing import Annotated

from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.limits import Amount, Count, Fraction
from subfleet.protocol.schema import ADDED_LATER

__all__ = ["LEAST_LINK_BPS", "Budget", "LogLow", "Reading"]

MAX_NETWORK_CHARACTERS = 64
LEAST_LINK_BPS = 16_000.0
"""Links count as at least this fast: a second without signal in a log would otherwise last for a whole round."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Reading:
    """One sample of a device's resources. None means unknown.

    Attributes:
        memory_free_bytes: memory that a process could take now without swapping.
        cgroup_limit_bytes: the control group's limit on this process, where there is one.
        downlink_bps: link rate towards the device, bits per second.
        uplink_bps: link rate from the device, bits per second.
        latency_s: round trip to the broker.
        cpu_load: fraction of all cores in use, 0 to 1.
        temperature_c: hottest sensor, degrees Celsius.
        battery_fraction: 0 (empty) to 1 (full).
        charging: whether external power is connected.
        network: kind of link, such as "wifi", "cellular" or "ethernet".
        available: whether the device may be given work.
    """

    memory_free_bytes: Count | None = None
    cgroup_limit_bytes: Count | None = None
    downlink_bps: Amount | None = None
    uplink_bps: Amount | None = None
    latency_s: Amount | None = None
    cpu_load: Amount | None = None
    temperature_c: float | None = None
    battery_fraction: Fraction | None = None
    charging: bool | None = None
    network: Annotated[str, Length(most=MAX_NETWORK_CHARACTERS)] | None = None
    available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LogLow:
    """Low quantiles of a replayed log, each by itself.

    Attributes:
        memory_budget_bytes: memory for training at that quantile.
        downlink_bps: link rate towards the device, bits per second; None is unknown.
        uplink_bps: link rate from the device, bits per second; None is unknown.
    """

    memory_budget_bytes: Count
    downlink_bps: Amount | None = None
    uplink_bps: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of one task on one device, which determines its submodel.

    Attributes:
        memory_bytes: growth of the device process's memory that training may cause.
        downlink_bytes: bytes that may be sent to the device in a round; None means no limit.
        uplink_bytes: bytes that the device may send in a round; None means no limit.
        forward_macs: multiply-accumulates of one sample's forward pass, so that the whole training fits its time; None
            means no limit.
        disk_bytes: disk space for a task; None if unknown. Not part of tasks, which the device checks itself.
    """

    memory_bytes: int
    downlink_bytes: int | None = None
    uplink_bytes: int | None = None
    forward_macs: int | None = field(default=None, metadata=ADDED_LATER)
    disk_bytes: int | None = field(default=None, metadata=ADDED_LATER)
