"""Settings of in-place distillation; `subfleet.elastic.distillation` computes it."""

from dataclasses import dataclass
from typing import Literal

from subfleet.protocol.errors import ConfigError

__all__ = ["DistillationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    iterations: int = 100
    batch_size: int = 64
    learning_rate: float = 1e-3
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("shared", "anchored", "copies"):
            raise ConfigError(f"the distillation mode is {self.mode!r}, but must be 'shared', 'anchored' or 'copies'")
        if self.iterations < 0 or self.batch_size < 2:
            raise ConfigError(
                f"distillation has {self.iterations} iterations of {self.batch_size} samples, but must have 0 or more "
                "of 2 or more"
            )
        if not (0 <= self.learning_rate < float("inf") and 0 < self.temperature < float("inf")):
            raise ConfigError(
                f"distillation has learning_rate {self.learning_rate} and temperature {self.temperature}, but they "
                "must be finite, the one 0 or more and the other above 0"
            )
