"""Settings of in-place distillation; `subfleet.elastic.distillation` computes it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount, Count, PositiveAmount

__all__ = ["DistillationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class DistillationSettings:
    """How the full model teaches.

    Attributes:
        mode: "shared", as in algorithm 1, moves the full model's own weights through the slices that the students are,
            and the teacher with them; "anchored" does the same, but the teacher stays as it was; "copies", as in
            section 3.3's text, trains a copy of each student and averages them with the full model. A teacher that
            moves may meet its students at one answer to everything, which forgets what clients learned.
        iterations: steps.
        batch_size: noise samples of a step, 2 or more.
        learning_rate: of Adam; 0 or more.
        temperature: by which the logits are divided, above 0; the divergence is multiplied by its square (Hinton et
            al. 2015, section 2).
    """

    mode: Literal["shared", "anchored", "copies"] = "shared"
    iterations: Count = 100
    batch_size: Annotated[int, Range(least=2)] = 64
    learning_rate: Amount = 1e-3
    temperature: PositiveAmount = 1.0
