"""Tiers of devices, by what paths of a supernet compute (FedorAS, section 4.1, "Clusters definition")."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

__all__ = ["Tier", "tier_for", "tiers_of"]

_CUMULATIVE = 0.95
"""Of random paths, those that the tiers below the highest divide among them."""
_DRAWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier: a path is of it where it takes more than `low_macs` and at most `high_macs`; the first has its low end.

    Attributes:
        number: from 1.
        low_macs: multiplications of one sample's forward pass.
        high_macs: the same; the budget of its devices.
    """

    number: int
    low_macs: int
    high_macs: int

    def holds(self, forward_macs: int) -> bool:
        """Whether a path that takes so many is of this tier."""
        least = self.low_macs if self.number == 1 else self.low_macs + 1
        return least <= forward_macs <= self.high_macs


@lru_cache(maxsize=8)  # it takes as long as several clients' assignments
def tiers_of(fixed_macs: int, choices: tuple[tuple[int, ...], ...], count: int, seed: int) -> tuple[Tier, ...]:
    """The tiers of a supernet.

    Of 100,000 random paths, whose operators are all equally likely, 95 % are below the highest tier, which goes on to
    the dearest path; the bounds of the others are evenly spaced from the cheapest path on. Where the dearest path alone
    is drawn more often than that, so that nothing would be above, they are spaced up to it.

    Args:
        fixed_macs: of what every path has.
        choices: of each choice the multiplications of its operators.
        count: how many tiers, 1 or more.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    total = np.full(_DRAWS, fixed_macs, dtype=np.int64)
    for own in choices:
        total += rng.choice(np.array(own, dtype=np.int64), size=_DRAWS)
    least, most = (fixed_macs + sum(map(pick, choices)) for pick in (min, max))
    upper = np.quantile(total, _CUMULATIVE)
    bounds = [*np.linspace(least, upper, count), most] if upper < most else np.linspace(least, most, count + 1)
    return tuple(
        Tier(number=number, low_macs=int(low), high_macs=int(high))
        for number, (low, high) in enumerate(pairwise(bounds), start=1)
    )


def tier_for(tiers: Sequence[Tier], forward_macs: int) -> Tier:
    """The highest tier whose budget a device has, of these; the lowest where it has none."""
    able = [one for one in tiers if one.high_macs <= forward_macs]
    return able[-1] if able else tiers[0]
