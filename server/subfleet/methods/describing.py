"""What people are told of a method: what it is, and in what it differs from its paper with its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from subfleet.elastic.merges import AnyStackedMerge
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.teaching import DistillationSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec

__all__ = ["MethodInfo", "Setting", "status_of", "those_true"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodInfo:
    """What people read of a method.

    Attributes:
        title: its name in the literature.
        paper: authors, title, venue and year.
        varies: in which ways its clients' subnets differ by default, out of "width", "depth" and "operator".
        runtimes: the program targets that can train it.
        judges: keys of a run's configuration on which the method's own departures have the word, so that nothing
            general is said of them.
    """

    title: str
    paper: str
    varies: tuple[Literal["width", "depth", "operator"], ...]
    runtimes: tuple[str, ...] = ("onnx", "executorch", "torch")
    judges: tuple[Literal["norms", "update_codec", "distillation"], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of a run, beside a method's own parameters, decides whether it does what its paper says.

    The defaults are those of a configuration that says nothing of them; `subfleet.settings.run.Run` has the
    words. None leaves it to the method; anything else takes the place of what the method has.
    """

    norm: str = "group"
    learnable_steps: bool = False
    scaler: bool = False
    norms: str = "averaged"
    merge: AnyStackedMerge | None = None
    server_optimiser: AnyServerOptimiser | None = None
    update_codec: AnyUpdateCodec | None = None
    distillation: DistillationSettings | None = None


def status_of(departures: Sequence[str]) -> str:
    """Of a method: "exact" where it does what its paper says, else in what it differs from it."""
    return "; ".join(departures) or "exact"


def those_true(told: Mapping[str, bool]) -> tuple[str, ...]:
    """The sentences that hold, in order."""
    return tuple(text for text, holds in told.items() if holds)
