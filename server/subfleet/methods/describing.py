"""What people are told of a method: what it is, and in what it differs from its paper with its parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from subfleet.elastic.merges import AnyStackedMerge
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.teaching import DistillationSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec

__all__ = ["MethodInfo", "Published", "Setting", "status_of", "those_true"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a paper has for a parameter of a method.

    Attributes:
        value: the paper's; where no value of the parameter does as the paper says, what it says.
        told: what is said where the parameter has another value: one sentence for all, or one for each value that
            departs; "" names both values; None leaves it to the method's own `departures`.
        matters: whether a method goes by the parameter at all, with its other ones as they are.
    """

    value: Any
    told: str | Mapping[Any, str] | None = ""
    matters: Callable[[Any], bool] = lambda method: True

    def departure(self, name: str, value: Any) -> str:
        """What is said of a value; empty where it is the paper's, or the method itself has the word."""
        if self.told is None or value == self.value:
            return ""
        if isinstance(self.told, str):
            return self.told or f"{name} is {value}, in the paper {self.value}"
        return self.told.get(value, "")


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
        published: by parameter, or by the path to one within it (`search.scoring`), what the paper has for it; None
            where the paper leaves it open, or has no such thing.
    """

    title: str
    paper: str
    varies: tuple[Literal["width", "depth", "operator"], ...]
    runtimes: tuple[str, ...] = ("onnx", "executorch", "torch")
    judges: tuple[Literal["norms", "update_codec", "distillation"], ...] = ()
    published: Mapping[str, Published | None] = field(default_factory=lambda: MappingProxyType({}))


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
