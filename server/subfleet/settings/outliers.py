"""What follows where an update is far from the others, or where a round has diverged."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from subfleet.protocol.bounds import Condition, Range, checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER

__all__ = ["OutlierSettings", "Outliers"]

Outliers = Literal["auto", "scale", "exclude", "report", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class OutlierSettings:
    """When an update or an aggregated round is suspect, and what follows.

    Attributes:
        outliers: what happens to an update that is far from the others: "scale" multiplies it and its weight by a
            factor below 1; "exclude" leaves it out, and its client for some rounds; "report" says so and changes
            nothing; "off" does not look. With "scale" and "exclude" a round that diverged is aggregated again without
            the most suspect updates. "auto" is "report" in an emulated fleet without attackers, and else "scale".
        change_factor: an update is far from the others where its change is more than so many times the usual one, or
            more than its training explains; above 1.
        remembered_rounds: rounds that tell the usual change where a round has fewer than four updates, 1 or more.
        loss_factor: a round has diverged where its evaluation loss is more than so many times the last one, or than
            that of guessing where that is more; 0 goes by losses that are not finite alone.
        exclusion_rounds: for how many rounds a client takes no part after an update that was left out; 0 or more.
        spoiled_tries: so many tries of a round that could not be aggregated, whoever was left out, end the run; 1 or
            more.

    Raises:
        ValueError: a value is out of range.
    """

    outliers: Outliers = field(default="auto", metadata=ADDED_LATER)
    change_factor: Annotated[
        float, Range(above=1, words="above 1; with outliers 'report' or 'off' every change counts as it is")
    ] = 5.0
    remembered_rounds: Positive = 5
    loss_factor: Annotated[
        float,
        Condition(accepts=lambda factor: factor == 0 or 1 < factor < math.inf, words="above 1, or 0 for no limit"),
    ] = 10.0
    exclusion_rounds: Count = 3
    spoiled_tries: Positive = 3

    @property
    def alters(self) -> bool:
        """Whether what is suspect counts less than it says, or not at all."""
        return self.outliers not in ("report", "off")

    def emulated(self, *, attacked: bool) -> "OutlierSettings":
        """The same for an emulated fleet: where nobody attacks it, everybody is honest, and "auto" alters nothing."""
        return self if attacked or self.outliers != "auto" else replace(self, outliers="report")
