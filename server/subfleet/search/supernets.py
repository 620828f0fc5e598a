"""Parts of a supernet for devices: operators within a budget of bytes, and tiers by what paths compute (FedorAS)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random

import numpy as np

_CUMULATIVE = 0.95
"""The fraction of random paths that the tiers below the highest divide among them."""
_DRAWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier of devices: its paths take more than `low_macs` and at most `high_macs`; the first includes `low_macs`.

    Attributes:
        number: from 1.
        low_macs: multiply-accumulates of one sample's forward pass.
        high_macs: the same; the budget of its devices.
    """

    number: int
    low_macs: int
    high_macs: int

    def holds(self, forward_macs: int) -> bool:
        """Whether a path with so many multiply-accumulates belongs to this tier."""
        least = self.low_macs if self.number == 1 else self.low_macs + 1
        return least <= forward_macs <= self.high_macs


@lru_cache(maxsize=8)  # it takes as long as the assignments of several clients
def list_tiers(fixed_macs: int, choices: tuple[tuple[int, ...], ...], count: int, seed: int) -> tuple[Tier, ...]:
    """The tiers of a supernet (FedorAS, section 4.1, "Clusters definition").

    Of 100,000 random paths with equally likely operators, 95 % lie below the highest tier, which extends to the most
    expensive path; the other bounds are evenly spaced from the cheapest path on. If the most expensive path alone is
    drawn more often than that, so that nothing lies above, all bounds are evenly spaced up to it.

    Args:
        fixed_macs: of the parts that every path has.
        choices: of each choice, the multiply-accumulates of its operators.
        count: how many tiers, 1 or more.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    total = np.full(_DRAWS, fixed_macs, dtype=np.int64)
    for costs in choices:
        total += rng.choice(np.array(costs, dtype=np.int64), size=_DRAWS)
    least, most = (fixed_macs + sum(map(pick, choices)) for pick in (min, max))
    upper = np.quantile(total, _CUMULATIVE)
    bounds = [*np.linspace(least, upper, count), most] if upper < most else np.linspace(least, most, count + 1)
    return tuple(
        Tier(number=number, low_macs=int(low), high_macs=int(high))
        for number, (low, high) in enumerate(pairwise(bounds), start=1)
    )


def find_tier(tiers: Sequence[Tier], forward_macs: int) -> Tier:
    """The highest of some tiers whose budget a device has; the lowest if it has none."""
    return next((tier for tier in reversed(tiers) if tier.high_macs <= forward_macs), tiers[0])


def draw_subspace(
    choices: Mapping[str, Mapping[str, int]], budget_bytes: float, rng: Random
) -> dict[str, tuple[str, ...]] | None:
    """Draw the operators that a client gets (FedorAS, equation 1).

    Operators without parameters come first, then one of each choice that has none of these, then others while they
    fit. All operators are equally likely to be next, but only small ones fit in the end, so these are kept more often
    than large ones, as in the public code.

    Args:
        choices: of each choice, in network order, the bytes of the operators that the device can run; one choice or
            more.
        budget_bytes: for all of them together.
        rng: the source of the draw.

    Returns:
        The operators of each choice, in network order; None if not one of each fits.
    """
    kept = {name: {operator for operator, size in sizes.items() if not size} for name, sizes in choices.items()}
    lacking = [name for name, operators in kept.items() if not operators]
    left = budget_bytes
    reserved = sum(min(choices[name].values(), default=0) for name in lacking)
    if not all(choices.values()) or reserved > left:
        return None
    rng.shuffle(lacking)
    for name in lacking:
        sizes = choices[name]
        reserved -= min(sizes.values())
        operator = rng.choice([operator for operator, size in sizes.items() if size <= left - reserved])
        kept[name].add(operator)
        left -= sizes[operator]
    others = [(name, operator) for name, sizes in choices.items() for operator in sizes if operator not in kept[name]]
    rng.shuffle(others)
    for name, operator in others:
        if choices[name][operator] <= left:
            kept[name].add(operator)
            left -= choices[name][operator]
    return {name: tuple(one for one in sizes if one in kept[name]) for name, sizes in choices.items()}
