"""What people are told of a method: what it is, and in what a run of it differs from its paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from subfleet.methods.techniques import Techniques
from subfleet.protocol.update_codecs import Uncompressed

if TYPE_CHECKING:
    from subfleet.methods.roles import Method

__all__ = ["MethodInfo", "Published", "Setting", "departures_of", "method_status", "status_of", "those_true"]


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
        varies: in which ways its clients' submodels differ by default, out of "width", "depth" and "operator".
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
    techniques: Techniques = field(default_factory=Techniques)

    @property
    def compressed(self) -> bool:
        """Whether the run has updates compressed, whatever the method does."""
        return self.techniques.codec != Uncompressed()


def status_of(departures: Sequence[str]) -> str:
    """Of a method: "exact" where it does what its paper says, else in what it differs from it."""
    return "; ".join(departures) or "exact"


def those_true(told: Mapping[str, bool]) -> tuple[str, ...]:
    """The sentences that hold, in order."""
    return tuple(text for text, holds in told.items() if holds)


def departures_of(method: Method, setting: Setting) -> tuple[str, ...]:
    """In what a method differs from its paper: by itself, and by each parameter that has not the paper's value."""
    told = (
        one.departure(name, attrgetter(name)(method))
        for name, one in method.INFO.published.items()
        if one is not None and one.matters(method)
    )
    return (*method.departures(setting), *filter(None, told))


def method_status(method: Method, setting: Setting, altered: Sequence[str] = ()) -> str:
    """Of a method in a run: "exact" where it does what its paper says, else in what it differs from it.

    Args:
        method: with its parameters.
        setting: what of the run decides, too.
        altered: what the run did with updates that its method would have taken as they are.
    """
    return status_of((*departures_of(method, setting), *_replaced(method, setting), *altered))


def _replaced(method: Method, setting: Setting) -> tuple[str, ...]:
    """What the run does in place of the method, where the method has no word on it itself."""
    own, run, judged = method.roles().techniques, setting.techniques, method.INFO.judges
    robust, optimiser, codec = run.robust_aggregation, run.server_optimiser, run.update_codec
    return those_true(
        {
            f"updates are aggregated by {robust.TYPE if robust else ''} in place of the mean (robust_aggregation)": (
                robust is not None
            ),
            f"the server's optimiser is {optimiser.TYPE if optimiser else ''} (server_optimiser)": optimiser is not None
            and type(optimiser) is not type(own.server_optimiser),
            f"updates are compressed by {codec.TYPE if codec else ''} (update_codec)": setting.compressed
            and "update_codec" not in judged,
            "norms are separate for each submodel (norms)": run.norms == "bank"
            and setting.norm != "none"
            and "norms" not in judged,
            "the whole model teaches its submodels (distillation)": run.teaches and "distillation" not in judged,
        }
    )
