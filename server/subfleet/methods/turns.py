"""What one client tells moves little: how far it is believed, and how often it is chosen by it."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

__all__ = ["Choice", "had_their_share", "most_believed", "trimmed_mean", "with_choice"]

_ROUNDS = 40
"""That are remembered: whoever comes late, stays away or was there before the fleet grew is held to these alone."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The clients that a round has chosen by what they told."""

    round: int
    clients: tuple[str, ...]


def had_their_share(
    choices: Sequence[Choice], *, round_number: int, wanted: int, known: int, most_often: float
) -> frozenset[str]:
    """The clients that were chosen in the last rounds as often as any may be, and rest while there are others.

    Args:
        choices: of the rounds before.
        round_number: of the round whose clients are chosen.
        wanted: how many that is.
        known: clients among which they are chosen.
        most_often: how many times as often as if all took turns; 0 is no limit.
    """
    if not most_often:
        return frozenset()
    before = [one for one in choices if one.round < round_number]
    share = min(1.0, most_often * wanted / max(known, 1))
    times = Counter(name for one in before for name in one.clients)
    return frozenset(name for name, count in times.items() if count >= max(1.0, share * (len(before) + 1)))


def with_choice(choices: Sequence[Choice], round_number: int, clients: Iterable[str]) -> tuple[Choice, ...]:
    """The choices of the last rounds with that of a round, in place of one that an earlier try of it made."""
    before = (one for one in choices if one.round < round_number)
    return (*before, Choice(round=round_number, clients=tuple(sorted(clients))))[1 - _ROUNDS :]
