"""When updates that are far from the others are suspect."""

import math
from dataclasses import dataclass

__all__ = ["SuspicionSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionSettings:
    """When an update or a folded round is suspect, and what follows.

    Attributes:
        change_factor: an update is refused whose change is more than so many times the usual one; 0 refuses none.
        remembered_rounds: rounds that tell the usual change where a round has fewer than four updates, 1 or more.
        loss_factor: a round has diverged where its evaluation loss is more than so many times the last one, or than
            that of guessing where that is more; 0 goes by losses that are not finite alone.
        exclusion_rounds: for how many rounds a client takes no part after an update that was refused so; 0 or more.
        spoiled_tries: so many tries of a round that could not be folded, whoever was left out, end the run; 1 or more.

    Raises:
        ValueError: a value is out of range.
    """

    change_factor: float = 10.0
    remembered_rounds: int = 5
    loss_factor: float = 10.0
    exclusion_rounds: int = 3
    spoiled_tries: int = 3

    def __post_init__(self) -> None:
        for name in ("change_factor", "loss_factor"):
            if not (getattr(self, name) == 0 or 1 < getattr(self, name) < math.inf):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 1, or 0 for no limit")
        for name, least in (("remembered_rounds", 1), ("exclusion_rounds", 0), ("spoiled_tries", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be {least} or more")
