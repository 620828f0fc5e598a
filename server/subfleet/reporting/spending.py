"""What a run has spent by the end of each round, and what it took to reach a value of its headline metric."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from subfleet.protocol.task_kinds import better

Axis = Literal["rounds", "seconds", "bytes", "macs", "joules"]
"""What quality is plotted over."""
AXES: Mapping[Axis, tuple[str, float, str]] = MappingProxyType(
    {
        "rounds": ("rounds", 1, ".3g"),
        "seconds": ("seconds", 1, ".4g"),
        "bytes": ("MB moved", 1e6, ".4g"),
        "macs": ("training GMACs", 1e9, ".4g"),
        "joules": ("training kJ", 1e3, ".4g"),
    }
)
"""The title, unit and format of each axis."""
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Values of the headline metric that a summary names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A run at the end of a round.

    Attributes:
        value: of the headline metric; None if it is unknown.
        rounds: finished rounds.
        seconds: of all rounds so far, each from its announcement until its model was evaluated; None if one of them was
            not measured.
        bytes: moved to and from clients so far.
        macs: multiply-accumulates of training so far.
        joules: energy of training so far; None if a device that trained does not know its own.
    """

    value: float | None
    rounds: int
    seconds: float | None
    bytes: int
    macs: int
    joules: float | None


def sum_spent(rounds: Sequence[Mapping[str, Any]], headline: str) -> Iterator[Spent]:
    """The run at the end of each of its rounds.

    Args:
        rounds: rows as in `summary.json`.
        headline: name of the metric.
    """
    seconds: float | None = 0.0
    joules: float | None = 0.0
    moved_bytes = macs = 0
    for number, row in enumerate(rounds, start=1):
        own_s = row.get("seconds")
        seconds = None if seconds is None or own_s is None else seconds + own_s
        own_joules = _sum_known(
            client.get("training_joules") for client in row["clients"] if client.get("training_macs")
        )
        joules = None if joules is None or own_joules is None else joules + own_joules
        moved_bytes += sum(client["bytes_down"] + client["bytes_up"] for client in row["clients"])
        macs += sum(client.get("training_macs", 0) for client in row["clients"])
        yield Spent(
            value=row.get(headline), rounds=number, seconds=seconds, bytes=moved_bytes, macs=macs, joules=joules
        )


def _sum_known(amounts: Iterable[float | None]) -> float | None:
    """The sum; None if one of them is unknown."""
    listed = list(amounts)
    known = [amount for amount in listed if amount is not None]
    return math.fsum(known) if len(known) == len(listed) else None


def find_first(spent: Sequence[Spent], target: float, headline: str) -> Spent | None:
    """The first round at whose end a target was reached; None if it never was."""
    sign = better(headline)
    return next((one for one in spent if one.value is not None and sign * one.value >= sign * target), None)


def list_reached(spent: Sequence[Spent], headline: str) -> list[dict[str, Any]]:
    """What it took to reach each of `LEVELS`, as plain data; empty for a metric of which less is better."""
    if better(headline) < 0:
        return []
    found = {level: find_first(spent, level, headline) for level in LEVELS}
    return [
        {"value": level, **{axis: getattr(first, axis) for axis in AXES}}
        for level, first in found.items()
        if first is not None
    ]
