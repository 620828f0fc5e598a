"""How an emulated fleet is run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked

__all__ = ["HostKind", "HostSettings"]

HostKind = Literal["processes", "batch"]
"""Where the devices of an emulated fleet are: "processes", one for each, with a real broker; or "batch", all in the
server's process, under a logical clock and without a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class HostSettings:
    """How an emulated fleet is run.

    Attributes:
        type: where its devices are.
        turns_per_round: of a batch: how often every party may act in one round, on average over the run, before the
            run is given up; a quiet round takes about ten.

    Raises:
        ValueError: a number is out of its range.
    """

    type: HostKind = "processes"
    turns_per_round: Annotated[int, Range(least=1)] = 5000
