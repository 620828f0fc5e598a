"""Scores of candidates: predictions of how well each one learns on a device's data."""

from collections.abc import Iterator
from dataclasses import dataclass

from subfleet.protocol.bounds import checked

MAX_CANDIDATES = 16
"""Candidates of one task."""


def _check_reason(score: float | None, reason: str) -> Iterator[str]:
    if (score is None) != bool(reason):
        yield f"score is {score} and reason {reason!r:.80}, but exactly one of the two must be set"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_reason)
class CandidateScore:
    """The score of a candidate.

    Attributes:
        score: the larger, the better; None if the candidate could not be scored.
        reason: why it could not be scored; else empty.
    """

    score: float | None
    reason: str = ""
