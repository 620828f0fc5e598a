"""How well candidates are expected to learn on a device's data, as the device reports it."""

from dataclasses import dataclass

__all__ = ["MAX_CANDIDATES", "CandidateScore"]

MAX_CANDIDATES = 16
"""Of one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """How well a candidate is expected to learn.

    Attributes:
        score: the larger, the better; None where it could not be scored.
        reason: for None, why.
    """

    score: float | None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.score is None) != bool(self.reason):
            raise ValueError(f"score is {self.score} and reason {self.reason!r:.80}, but one of them must be given")
