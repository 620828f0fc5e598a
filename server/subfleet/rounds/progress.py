"""Where a run stands: its phase, and the attempts of its open round that left nothing to aggregate. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

PhaseName = Literal["waiting", "measure", "train", "aggregate", "evaluate", "search", "deploy", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Between rounds: for clients, for the pause after a lost attempt to be over, or for what comes next."""

    TYPE: ClassVar[Literal["waiting"]] = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """A round was announced, and clients say what they can give."""

    TYPE: ClassVar[Literal["measure"]] = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Clients are given submodels and train them."""

    TYPE: ClassVar[Literal["train"]] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregating:
    """The updates become the next model."""

    TYPE: ClassVar[Literal["aggregate"]] = "aggregate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """Clients say how good the new model is on data that it was not trained on."""

    TYPE: ClassVar[Literal["evaluate"]] = "evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """Paths of a supernet are proposed and scored, a generation at a time.

    Attributes:
        generations: that have been scored.
    """

    TYPE: ClassVar[Literal["search"]] = "search"
    generations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploying:
    """Clients are given their own models."""

    TYPE: ClassVar[Literal["deploy"]] = "deploy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run has ended."""

    TYPE: ClassVar[Literal["finished"]] = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run has ended before its last round.

    Attributes:
        why: in words, with what to do.
    """

    TYPE: ClassVar[Literal["failed"]] = "failed"
    why: str


Phase = Waiting | Measuring | Training | Aggregating | Evaluating | Searching | Deploying | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A client that fails in every attempt of the open round, for what another attempt does not change.

    Attributes:
        times: in how many attempts, one after the other.
        first: why in the first of them, as tables have it.
        last: the same of the last.
    """

    times: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """The tries that left nothing to aggregate; when that was is in `LiveState.retries`.

    Attributes:
        retry: of the open round, or of the last one.
        lost: of the whole run.
        waits_for: who did not take part in the last one and why; empty where the round was aggregated.
        failing: the clients whose attempts come to nothing again and again, see `continuing`.
    """

    retry: int = 0
    lost: int = 0
    waits_for: str = ""
    failing: Mapping[str, Failing] = field(default_factory=lambda: MappingProxyType({}))
