"""How a device draws paths of a supernet, and what it reports about them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import NAMED_ONCE, Range, checked
from subfleet.protocol.limits import Count, Fraction, Loss

PathSampler = Literal["greedy", "exact", "reject"]
"""How a path is drawn: operator by operator within what is left (FedorAS, equation 3); uniformly over all valid paths;
or anew until one is valid (Guo et al. 2020, section 3.3)."""

OperatorExamples = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""By choice and operator, how many examples went through it, epochs counted (FedorAS, section 3.1)."""
_Examples = Annotated[int, Range(least=0, most=2**53)]
ReportedExamples = Annotated[
    tuple[tuple[str, Annotated[tuple[tuple[str, _Examples], ...], NAMED_ONCE]], ...], NAMED_ONCE
]
"""The same, as a device reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PathSettings:
    """Settings for drawing a path for each batch.

    Attributes:
        sampler: how.
        forward_macs: the most multiplications of one sample's forward pass that a path may take; None is no limit.
    """

    sampler: PathSampler = "greedy"
    forward_macs: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PathScore:
    """The score of one path of a population on a device's held-out data.

    Attributes:
        loss: mean over the labels that counted, 0 or more.
        accuracy: share of them that were predicted rightly, 0 to 1.
    """

    loss: Loss
    accuracy: Fraction
