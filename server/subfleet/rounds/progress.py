"""The progress of a run: its phase, and the attempts of its open round that aggregated nothing. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

PhaseName = Literal["waiting", "measure", "train", "aggregate", "evaluate", "search", "deploy", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Between rounds: the run waits for clients, for the end of a pause, or for the next phase."""

    TYPE: ClassVar[Literal["waiting"]] = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """A round was announced, and clients send their telemetry."""

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
    """Clients evaluate the new model on held-out data."""

    TYPE: ClassVar[Literal["evaluate"]] = "evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """Paths of a supernet are proposed and scored, a generation at a time.

    Attributes:
        generations: number of scored generations.
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
        why: the reason, and what to do.
    """

    TYPE: ClassVar[Literal["failed"]] = "failed"
    why: str


Phase = Waiting | Measuring | Training | Aggregating | Evaluating | Searching | Deploying | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A client that fails in every attempt of the open round, for a reason that another attempt does not change.

    Attributes:
        times: number of consecutive attempts.
        first: the reason in the first of them.
        last: the reason in the last of them.
    """

    times: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempts:
    """The attempts that aggregated nothing; their times are in `LiveState.attempt_times`.

    Attributes:
        count: number of such attempts of the open or last round.
        lost: the same of the whole run.
        waits_for: which clients did not take part in the last one, and why; empty once the round is aggregated.
        failing: the clients that fail in every attempt, see `closing`.
    """

    count: int = 0
    lost: int = 0
    waits_for: str = ""
    failing: Mapping[str, Failing] = field(default_factory=lambda: MappingProxyType({}))
