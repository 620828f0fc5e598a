"""What people are told of a method: what it is, and in what it differs from its paper with its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MethodInfo", "Setting", "status_of", "those_true"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodInfo:
    """What people read of a method.

    Attributes:
        title: its name in the literature.
        paper: authors, title, venue and year.
        varies: in which ways its clients' subnets differ by default, out of "width", "depth" and "operator".
        runtimes: the program targets that can train it.
    """

    title: str
    paper: str
    varies: tuple[Literal["width", "depth", "operator"], ...]
    runtimes: tuple[str, ...] = ("onnx", "executorch", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of a run, beside a method's own parameters, decides whether it does what its paper says.

    The defaults are those of a configuration that says nothing of them; `subfleet.server.config.ServerConfig` has the
    words.
    """

    norm: str = "group"
    learnable_steps: bool = False
    scaler: bool = False
    norms: str = "averaged"
    compressed: bool = False


def status_of(departures: Sequence[str]) -> str:
    """Of a method: "exact" where it does what its paper says, else in what it differs from it."""
    return "; ".join(departures) or "exact"


def those_true(told: Mapping[str, bool]) -> tuple[str, ...]:
    """The sentences that hold, in order."""
    return tuple(text for text, holds in told.items() if holds)
