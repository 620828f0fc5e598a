"""Scores of candidates, which predict how well they learn on a device's data."""

from collections.abc import Iterator
from dataclasses import dataclass

from subfleet.protocol.bounds import checked

MAX_CANDIDATES = 16
"""Of one task."""


def _check_reason(score: float | None, reason: str) -> Iterator[str]:
    if (score is None) != bool(reason):
        yield f"score is {score} and reason {reason!r:.80}, but one of them must be given"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_reason)
class CandidateScore:
    """The score of a candidate.

    Attributes:
        score: the larger, the better; None where it could not be scored.
        reason: for None, why.
    """

    score: float | None
    reason: str = ""
