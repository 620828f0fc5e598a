"""Plausible ranges of the numbers that a device reports; the server clips them.

A device with a broken clock or sensor may still train, so an implausible number does not exclude it. But whatever is
computed from such numbers must stay finite.
"""

import operator
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

_BYTES = (0, 2**50)
_BPS = (0.0, 1e13)
_SECONDS = (0.0, 1e9)
PLAUSIBLE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "macs_per_s": (1e3, 1e18),
        "training_watts": (1e-3, 1e4),
        "memory_total_bytes": _BYTES,
        "memory_free_bytes": _BYTES,
        "max_training_bytes": _BYTES,
        "cgroup_limit_bytes": _BYTES,
        "memory_budget_bytes": _BYTES,
        "disk_budget_bytes": _BYTES,
        "available_bytes": _BYTES,
        "measured_peak_bytes": _BYTES,
        "downlink_bps": _BPS,
        "uplink_bps": _BPS,
        "latency_s": _SECONDS,
        "log_time_s": (-1e12, 1e12),
        "seconds": _SECONDS,
        "train_seconds": _SECONDS,
        "cpu_load": (0.0, 1e6),
        "temperature_c": (-273.15, 1e6),
        "step_count": (0, 2**50),
        "accuracy": (0.0, 1.0),
        "score": (-1e30, 1e30),
    }
)
"""Least and largest plausible value of each field, by its name in any record."""

_Record = TypeVar("_Record")


def plausible(record: _Record) -> _Record:
    """Clip every number of the table to its range; returns the same object if all are within."""
    changes = {}
    for field in fields(record):  # type: ignore[arg-type]  # messages, and records that they consist of
        before = getattr(record, field.name)
        after = _plausible(field.name, before)
        if after is not before:
            changes[field.name] = after
    return replace(record, **changes) if changes else record  # type: ignore[type-var]  # as above


def _plausible(name: str, value: Any) -> Any:
    if isinstance(value, int | float):
        least, most = PLAUSIBLE.get(name, (value, value))
        return value if least <= value <= most else type(value)(least if value < least else most)
    if is_dataclass(value) and not isinstance(value, type):
        return plausible(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        parts = tuple(_plausible(name, part) for part in value)
        return value if all(map(operator.is_, parts, value)) else parts
    return value
