"""What a client reports about itself is a claim: how far one client's values count, and how often they select it."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from subfleet.methods.selector import SelectionContext

_ROUNDS = 40
"""Remembered selections: a client that joins late, or from before the fleet grew, is compared over these alone."""
_SPREADS = 3.0
_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSelection:
    """The clients that a round selected because of what they reported."""

    round: int
    clients: tuple[str, ...]


def find_overselected(
    context: SelectionContext, selections: Sequence[PastSelection], count: int, most_often: float
) -> frozenset[str]:
    """The clients that earlier rounds selected too often to be selected now while there are others.

    Args:
        context: of the round that selects.
        selections: of earlier rounds.
        count: how many clients are selected now.
        most_often: the limit, as a multiple of what a client would get if all took turns; 0 is no limit.
    """
    if not most_often:
        return frozenset()
    before = [selection for selection in selections if selection.round < context.round]
    fraction = min(1.0, most_often * count / max(len(context.clients), 1))
    times = Counter(name for selection in before for name in selection.clients)
    return frozenset(name for name, number in times.items() if number >= max(1.0, fraction * (len(before) + 1)))


def bound_claims(values: Iterable[float]) -> float:
    """The largest value that is believed of one client: three standard deviations above the median of all.

    Median and deviation are those of the lower middle, so that neither of two clients sets them. Up to half of the
    clients, whatever they claim, move the bound by no more than the others differ.
    """
    ordered = sorted(values)
    middle = median_low(ordered)
    spread = median_low(sorted(abs(value - middle) for value in ordered))
    return middle + _SPREADS * _OF_NORMAL * spread


def trimmed_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean without the largest and the smallest quarter of the values; of three, the middle one.

    Args:
        values: one or more; from three on, at least one is left out at each end.
        weights: of each, above 0.
    """
    trimmed = max(1, len(values) // 4) if len(values) > 2 else 0
    kept = sorted(zip(values, weights, strict=True))[trimmed : len(values) - trimmed]
    return math.fsum(value * weight for value, weight in kept) / math.fsum(weight for _, weight in kept)


def add_selection(
    selections: Sequence[PastSelection], round_number: int, clients: Iterable[str]
) -> tuple[PastSelection, ...]:
    """The selections of the last rounds with this round's, in place of that of an earlier attempt."""
    before = (selection for selection in selections if selection.round < round_number)
    return (*before, PastSelection(round=round_number, clients=tuple(sorted(clients))))[1 - _ROUNDS :]
