"""What one client tells moves little: how far it is believed, and how often it is chosen by it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low

__all__ = ["Chosen", "had_their_share", "most_believed", "trimmed_mean", "with_chosen"]

Chosen = Mapping[str, int]
"""By client, in how many rounds it was chosen by what it told."""

_SPREADS = 3.0
_OF_NORMAL = 1.4826
"""A standard deviation over the median of absolute deviations, of a normal distribution."""


def most_believed(values: Iterable[float]) -> float:
    """The most that is believed of one client's value: three standard deviations above the median of all.

    Median and deviation are of the lower middle, so that neither of two clients decides what is usual. Up to half of
    the clients, whatever they claim, move this by no more than the others differ.
    """
    known = sorted(values)
    middle = median_low(known)
    spread = median_low(sorted(abs(value - middle) for value in known))
    return middle + _SPREADS * _OF_NORMAL * spread


def trimmed_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean of values without the largest and the smallest quarter of them, from three on at least one.

    Of three it is the one in the middle; so one member moves it no further than where the others are.

    Args:
        values: one or more.
        weights: of each, above 0.
    """
    left_out = max(1, len(values) // 4) if len(values) > 2 else 0
    kept = sorted(zip(values, weights, strict=True))[left_out : len(values) - left_out]
    return math.fsum(value * weight for value, weight in kept) / math.fsum(weight for _, weight in kept)


def had_their_share(chosen: Chosen, *, round_number: int, wanted: int, known: int, most_often: float) -> frozenset[str]:
    """The clients that were chosen as often by now as any may be, and rest while there are others.

    Args:
        chosen: in the rounds before.
        round_number: of the round whose clients are chosen.
        wanted: how many that is.
        known: clients among which they are chosen.
        most_often: how many times as often as if all took turns; 0 is no limit.
    """
    share = min(1.0, most_often * wanted / max(known, 1)) if most_often else 1.0
    return frozenset(name for name, count in chosen.items() if count >= 1 + share * (round_number - 1))


def with_chosen(chosen: Chosen, names: Collection[str], known: Collection[str]) -> Chosen:
    """The counts after a round, of clients that are known."""
    return {name: chosen.get(name, 0) + (name in names) for name in sorted({*names, *(chosen.keys() & set(known))})}
