"""What a method reports about itself: its paper, and how a run differs from that paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from subfleet.methods.techniques import Techniques
from subfleet.protocol.update_codecs import Uncompressed

if TYPE_CHECKING:
    from subfleet.methods.roles import Method

__all__ = ["MethodInfo", "Published", "Setting", "always", "parameter", "parameters"]

T = TypeVar("T")

_PAPER = "paper"
"""Key of a parameter's metadata: what the paper has for it, or for each of its own parameters by their paths."""
_THE_DEFAULT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The part of a run, beside the method's own parameters, that decides whether it does what the paper says.

    The defaults are those of an empty configuration; `subfleet.settings.run.Run` documents each key.
    """

    norm: str = "group"
    learnable_steps: bool = False
    scaler: bool = False
    asynchronous: bool = False
    techniques: Techniques = field(default_factory=Techniques)

    @property
    def compressed(self) -> bool:
        """Whether the run itself compresses updates, independent of the method."""
        return self.techniques.codec != Uncompressed()


Condition = Callable[[Any, Setting], bool]
"""Whether something applies to a method with its parameters, in the setting of a run."""


def always(method: Any, setting: Setting) -> bool:
    """The condition of a departure that no parameter removes."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The paper's value of one parameter.

    Attributes:
        value: the paper's value; its words if no value of the parameter does what the paper says.
        otherwise: the departure if the parameter has another value: one sentence for all values, or one for each value
            that departs. "" states both values; None leaves it to `MethodInfo.departures`.
        matters: whether the parameter has any effect, given the method's other parameters.
    """

    value: Any
    otherwise: str | Mapping[Any, str] | None = ""
    matters: Callable[[Any], bool] = lambda method: True

    def describe_departure(self, name: str, value: Any) -> str:
        """The departure of a value; empty if it is the paper's, or if another place describes it."""
        if self.otherwise is None or value == self.value:
            return ""
        if isinstance(self.otherwise, str):
            return self.otherwise or f"{name} is {value}, in the paper {self.value}"
        return self.otherwise.get(value, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodInfo:
    """The description of a method.

    Attributes:
        title: its name in the literature.
        paper: authors, title, venue and year.
        varies: how its clients' submodels differ by default.
        runtimes: the program targets that can train it.
        judges: keys of a run's configuration that `departures` covers, so that nothing general is said about them.
        departures: other differences from the paper, one sentence each, and when each applies. A sentence may name
            parameters, such as "{method.proposals}".
    """

    title: str
    paper: str
    varies: tuple[Literal["width", "depth", "operator"], ...] = ()
    runtimes: tuple[str, ...] = ("onnx", "executorch", "torch")
    judges: tuple[Literal["norms", "update_codec", "distillation"], ...] = ()
    departures: Mapping[str, Condition] = field(default_factory=lambda: MappingProxyType({}))


def parameter(
    default: T,
    *,
    paper: Any = _THE_DEFAULT,
    otherwise: str | Mapping[Any, str] | None = "",
    matters: Callable[[Any], bool] = lambda method: True,
) -> T:
    """A parameter of a method, as a field of its dataclass, for which the paper states a value.

    For a plain default, the paper leaves the value open, or has no such parameter.

    Args:
        default: the default.
        paper: the paper's value, if it is not the default; see `Published.value`.
        otherwise: the departure if the parameter has another value; see `Published`.
        matters: whether the parameter has any effect; see `Published`.
    """
    value = Published(value=default if paper is _THE_DEFAULT else paper, otherwise=otherwise, matters=matters)
    own: T = field(default=default, metadata={_PAPER: {"": value}})
    return own


def parameters(kind: type[T], **paper: Published) -> T:
    """A parameter of a method that is a record of further parameters; its default is the record's.

    Args:
        kind: the class of the record.
        paper: what the paper has, by parameter of the record, if its class does not state it.
    """
    paths = {**list_parameters(kind), **paper}
    own: T = field(default_factory=kind, metadata={_PAPER: {f".{path}": value for path, value in paths.items()}})
    return own


def list_parameters(kind: Any) -> dict[str, Published | None]:
    """The parameters of a method, nested ones as paths (`search.scoring`), and what the paper has.

    It is None if the paper leaves the value open or has no such parameter.
    """
    return {
        f"{own.name}{path}": value
        for own in fields(kind)
        for path, value in own.metadata.get(_PAPER, {"": None}).items()
    }


def join_departures(departures: Sequence[str]) -> str:
    """The departures as one text; "exact" without any."""
    return "; ".join(departures) or "exact"


def list_departures(method: Method, setting: Setting) -> tuple[str, ...]:
    """How a method differs from its paper: by design, and by each parameter that does not have the paper's value."""
    own = (text.format(method=method) for text, applies in method.INFO.departures.items() if applies(method, setting))
    by_parameter = (
        value.describe_departure(path, attrgetter(path)(method))
        for path, value in list_parameters(type(method)).items()
        if value is not None and value.matters(method)
    )
    return (*own, *filter(None, by_parameter))


def describe_status(method: Method, setting: Setting, altered: Sequence[str] = ()) -> str:
    """How a run differs from the paper of its method; "exact" if it does not.

    Args:
        method: with its parameters.
        setting: of the run.
        altered: what the run did to updates, such as scaling some down.
    """
    return join_departures((*list_departures(method, setting), *_list_replacements(method, setting), *altered))


def _list_replacements(method: Method, setting: Setting) -> Iterator[str]:
    """The techniques that the run replaces and `MethodInfo.judges` does not name."""
    own, run, judged = method.roles().techniques, setting.techniques, method.INFO.judges
    optimiser = run.server_optimiser
    if run.robust_aggregation is not None:
        yield f"updates are aggregated by {run.robust_aggregation.TYPE} in place of the mean (robust_aggregation)"
    if optimiser is not None and type(optimiser) is not type(own.server_optimiser):
        yield f"the server's optimiser is {optimiser.TYPE} (server_optimiser)"
    if setting.asynchronous:
        yield "no device waits for another, and changes count less the older their model is (asynchronous)"
    if setting.compressed and "update_codec" not in judged:
        yield f"updates are compressed by {run.codec.TYPE} (update_codec)"
    if run.norms == "bank" and setting.norm != "none" and "norms" not in judged:
        yield "norms are separate for each submodel (norms)"
    if run.teaches and "distillation" not in judged:
        yield "the whole model teaches its submodels (distillation)"
