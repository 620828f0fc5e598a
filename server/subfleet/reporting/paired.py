"""Differences between two methods over the same seeds, with an interval; what the interval cannot tell is a tie."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PairedDifference", "paired_difference"]

# Two-sided 95 % points of Student's t by degrees of freedom; between two entries the lower one's counts, which makes
# the interval a little wider than it had to be.
_T95 = (
    *((1, 12.7062), (2, 4.3027), (3, 3.1825), (4, 2.7765), (5, 2.5706), (6, 2.4470), (7, 2.3647), (8, 2.3061)),
    *((9, 2.2622), (10, 2.2282), (11, 2.2010), (12, 2.1789), (13, 2.1604), (14, 2.1448), (15, 2.1315), (16, 2.1200)),
    *((17, 2.1099), (18, 2.1010), (19, 2.0931), (20, 2.0860), (21, 2.0797), (22, 2.0739), (23, 2.0687), (24, 2.0639)),
    *((25, 2.0596), (26, 2.0556), (27, 2.0519), (28, 2.0485), (29, 2.0453), (30, 2.0423), (40, 2.0211), (60, 2.0003)),
    (120, 1.9800),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The mean of one method's figure minus another's, and its 95 % interval.

    Attributes:
        low: lower end of the interval, as high is its upper end.
        pairs: how many seeds it rests on.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def tie(self) -> bool:
        """Whether the interval holds 0, so that neither is better as far as these seeds tell."""
        return self.low <= 0 <= self.high


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference:
    """Compare two methods over the same seeds (Student's t over the pairs' differences).

    Args:
        ours: one figure a seed.
        theirs: the other method's, in the same order.

    Raises:
        ValueError: there are fewer than 2 pairs, or the counts differ.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"there are {len(ours)} and {len(theirs)} figures, but there must be equally many, at least 2")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    reach = _t95(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return PairedDifference(mean=mean, low=mean - reach, high=mean + reach, pairs=count)


def _t95(freedom: int) -> float:
    return next(value for least, value in reversed(_T95) if freedom >= least)
