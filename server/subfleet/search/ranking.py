"""How far two lists of scores rank the same things alike."""

import math
from collections.abc import Sequence

__all__ = ["kendall_tau"]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of scores of the same things, from -1 to 1.

    Args:
        one: scores.
        other: of the same, in the same order.

    Returns:
        None where there are fewer than two, or all of a list are alike: nothing is ranked then.
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(one, other).statistic) if len(one) > 1 else math.nan
    return None if math.isnan(tau) else tau
