"""How a device draws the paths of a supernet that it trains, and what it tells of them. Plain data."""

from dataclasses import dataclass
from typing import Literal

from subfleet.protocol.limits import MAX_LOSS

__all__ = ["OperatorExamples", "PathSampler", "PathScore", "PathSettings", "check_examples"]

_MOST_EXAMPLES = 2**53

PathSampler = Literal["greedy", "exact", "reject"]
"""How a path is drawn: operator by operator within what is left (FedorAS, equation 3); uniformly over all valid paths;
or anew until one is valid (Guo et al. 2020, section 3.3)."""

OperatorExamples = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""By choice and operator, how many examples went through it, epochs counted (FedorAS, section 3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    """What a device goes by when it draws a path for each batch.

    Attributes:
        sampler: how.
        forward_macs: the most multiplications of one sample's forward pass that a path may take; None is no limit.
    """

    sampler: PathSampler = "greedy"
    forward_macs: int | None = None

    def __post_init__(self) -> None:
        if self.forward_macs is not None and self.forward_macs < 0:
            raise ValueError(f"forward_macs is {self.forward_macs}, but must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathScore:
    """How good one path of a population is on a device's held-out data.

    Attributes:
        loss: mean over the labels that counted, 0 or more.
        accuracy: share of them that were predicted rightly, 0 to 1.
    """

    loss: float
    accuracy: float

    def __post_init__(self) -> None:
        if not 0 <= self.loss < MAX_LOSS or not 0 <= self.accuracy <= 1:
            raise ValueError(
                f"a path's loss is {self.loss} and its accuracy {self.accuracy}, but they must be from 0 to "
                f"{MAX_LOSS:g}, and from 0 to 1"
            )


def check_examples(examples: OperatorExamples) -> None:
    """Make sure that counts of examples name each choice and operator once, and are 0 or more.

    Raises:
        ValueError: they are not.
    """
    choices = [choice for choice, _ in examples]
    if len(set(choices)) < len(choices):
        raise ValueError("the counts of examples name a choice twice, but must name each once")
    for choice, counts in examples:
        if len({operator for operator, _ in counts}) < len(counts):
            raise ValueError(
                f"the counts of examples name an operator of {choice!r:.80} twice, but must name each once"
            )
        if not all(0 <= count <= _MOST_EXAMPLES for _, count in counts):
            raise ValueError(f"the counts of examples of {choice!r:.80} must be from 0 to 2^53")
