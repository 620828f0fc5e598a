"""What a run knows of the attempts of its open round that left nothing to fold. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["Failing", "Tries"]


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
    """The tries that left nothing to fold; when that was is in `LiveState.retries`.

    Attributes:
        retry: of the open round, or of the last one.
        lost: of the whole run.
        waits_for: who did not take part in the last one and why; empty where the round was folded.
        failing: the clients whose attempts come to nothing again and again, see `retrying`.
    """

    retry: int = 0
    lost: int = 0
    waits_for: str = ""
    failing: Mapping[str, Failing] = field(default_factory=lambda: MappingProxyType({}))
