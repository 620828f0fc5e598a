"""When devices say how good the model is on data of their own that it was not trained on."""

from dataclasses import dataclass
from typing import Annotated

from subfleet.protocol.bounds import Range, checked

__all__ = ["Evaluations"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Evaluations:
    """When devices with held-out data evaluate the model that they would be given.

    Attributes:
        every: after how many rounds, 0 or more; 0 is not between rounds.
        last: also after the last round.
        per_class: they count the labels of each class, and those that were predicted rightly.
    """

    every: Annotated[int, Range(least=0, words="a number of rounds, or 0 for none between rounds")] = 0
    last: bool = True
    per_class: bool = False

    def due(self, round_number: int, total_rounds: int) -> bool:
        """Whether devices evaluate after a round."""
        return (self.last and round_number >= total_rounds) or (self.every > 0 and round_number % self.every == 0)
