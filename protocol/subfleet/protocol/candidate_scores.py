"""How well candidates are expected to learn on a device's data, as the device reports it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from subfleet.protocol.bounds import Rules, check_record

__all__ = ["MAX_CANDIDATES", "CandidateScore"]

MAX_CANDIDATES = 16
"""Of one task."""


def _check_reason(score: float | None, reason: str) -> Iterator[str]:
    if (score is None) != bool(reason):
        yield f"score is {score} and reason {reason!r:.80}, but one of them must be given"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """How well a candidate is expected to learn.

    Attributes:
        score: the larger, the better; None where it could not be scored.
        reason: for None, why.
    """

    score: float | None
    reason: str = ""

    __post_init__ = check_record
    RULES: ClassVar[Rules] = (_check_reason,)
