"""What is asked of a device that scores candidates on its own data, and what it answers, as plain data."""

from dataclasses import dataclass

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["MAX_CANDIDATES", "CandidateScore", "Scoring"]

MAX_CANDIDATES = 16
"""Of one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Candidates to be scored; the task names a program for each, in the same order.

    Attributes:
        specs: of the candidates, 1 to 16.
        weights: those that each is scored with: as they are before any training.
        batches: whose gradients are compared, 2 or more; all are of the device's first epoch in round 0.
    """

    specs: tuple[SubnetSpec, ...]
    weights: tuple[BlobRef, ...]
    batches: int = 2

    def __post_init__(self) -> None:
        if not 1 <= len(self.specs) <= MAX_CANDIDATES or len(self.weights) != len(self.specs):
            raise ValueError(
                f"there are {len(self.specs)} candidates and weights for {len(self.weights)}, but there must be 1 to "
                f"{MAX_CANDIDATES} with weights for each"
            )
        if self.batches < 2:
            raise ValueError(f"batches is {self.batches}, but a score compares the gradients of 2 or more")


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
