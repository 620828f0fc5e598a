"""How a device draws paths of a supernet, and what it reports about them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import NAMED_ONCE, Range, checked
from subfleet.protocol.limits import Count, Fraction, Loss

PathSampler = Literal["greedy", "exact", "reject"]
"""How a path is drawn: "greedy" draws operator by operator within the remaining budget (FedorAS, equation 3), "exact"
uniformly over all valid paths, "reject" again and again until a path is valid (Guo et al. 2020, section 3.3)."""

OperatorExamples = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""Examples that went through each operator of each choice, over all epochs (FedorAS, section 3.1)."""
_Examples = Annotated[int, Range(least=0, most=2**53)]
ReportedExamples = Annotated[
    tuple[tuple[str, Annotated[tuple[tuple[str, _Examples], ...], NAMED_ONCE]], ...], NAMED_ONCE
]
"""`OperatorExamples` with the bounds of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PathSettings:
    """Settings for drawing a path for each batch.

    Attributes:
        sampler: how paths are drawn.
        forward_macs: limit on the multiplications of one sample's forward pass; None means no limit.
    """

    sampler: PathSampler = "greedy"
    forward_macs: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PathScore:
    """The score of one path of a population on a device's held-out data.

    Attributes:
        loss: mean over the labels that count, 0 or more.
        accuracy: fraction of them that was predicted correctly, 0 to 1.
    """

    loss: Loss
    accuracy: Fraction
