"""What is asked of a device that scores candidates on its own data, and what it answers, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length, Range, Rules, check_record
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["MAX_CANDIDATES", "CandidateScore", "Scoring"]

MAX_CANDIDATES = 16
"""Of one task."""


def _check_weights(specs: tuple[SubnetSpec, ...], weights: tuple[BlobRef, ...]) -> Iterator[str]:
    if len(weights) != len(specs):
        yield f"there are {len(specs)} candidates and weights for {len(weights)}, but each must have weights"


def _check_reason(score: float | None, reason: str) -> Iterator[str]:
    if (score is None) != bool(reason):
        yield f"score is {score} and reason {reason!r:.80}, but one of them must be given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Candidates to be scored; the task names a program for each, in the same order.

    Attributes:
        specs: of the candidates, 1 to 16.
        weights: those that each is scored with: as they are before any training.
        batches: whose gradients are compared, 2 or more; all are of the device's first epoch in round 0.
    """

    specs: Annotated[tuple[SubnetSpec, ...], Length(least=1, most=MAX_CANDIDATES)]
    weights: tuple[BlobRef, ...]
    batches: Annotated[int, Range(least=2)] = 2

    __post_init__ = check_record
    RULES: ClassVar[Rules] = (_check_weights,)


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
