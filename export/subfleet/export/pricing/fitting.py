"""What a segment takes at sizes that were not recorded, from recordings of it at other sizes.

The size of a block is a product of a constant and some of the local axes' sizes, now and then plus a constant: that of
a tensor's dimensions. So the blocks of a few recordings tell which axes. Which form a lowering chooses depends on
thresholds; a form is taken as known between two recordings of the same form, one smaller and one larger in every axis.
Where either is open, there is no answer, and the program itself must be recorded.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from subfleet.export.pricing.recording import Segment

__all__ = ["Sizes", "segment_at"]

Sizes = tuple[int, ...]
_Floats = npt.NDArray[np.float64]

_MOST_FACTORS = 3
_NEARLY = 1e-9
_OPEN_BYTES = 2**14
"""As little is at stake in a segment that it does not matter which axes its blocks follow."""


def segment_at(recorded: Mapping[Sizes, Segment], sizes: Sizes) -> Segment | None:
    """The segment at some sizes of its layers; None where the recordings leave open what it is.

    Args:
        recorded: the same layers' segment at other sizes.
        sizes: every dimension of the layers' tensors.
    """
    if sizes in recorded:
        return recorded[sizes]
    below = {segment.events for known, segment in recorded.items() if _within(known, sizes)}
    above = {segment.events for known, segment in recorded.items() if _within(sizes, known)}
    forms = below & above
    if len(forms) != 1:
        return None
    form = forms.pop()
    alike = {known: segment for known, segment in recorded.items() if segment.events == form}
    if not form:
        return next(iter(alike.values()))
    blocks = _blocks_at(alike, sizes)
    if blocks is None:
        return None
    weights = (segment.weight for segment in alike.values())
    return Segment(events=form, sizes=blocks, weight=max(weights))


def _within(smaller: Sizes, larger: Sizes) -> bool:
    return all(a <= b for a, b in zip(smaller, larger, strict=True))


def _blocks_at(recorded: Mapping[Sizes, Segment], sizes: Sizes) -> tuple[int, ...] | None:
    dims = np.array([*recorded, sizes], dtype=np.float64)
    terms = _terms(dims)
    known, wanted = terms[:-1], terms[-1]
    found = np.array([segment.sizes for segment in recorded.values()], dtype=np.float64)
    lowest, highest = _by_products(found, known, wanted)
    for place in np.flatnonzero(np.isinf(highest)):
        lowest[place], highest[place] = _by_sums(found[:, place], known, wanted)
    if not np.isfinite(highest).all() or float((highest - lowest).sum()) > _OPEN_BYTES:
        return None
    return tuple(math.ceil(size - _NEARLY * size) for size in highest)


def _terms(dims: _Floats) -> _Floats:
    """Every product of up to three of the dimensions that differ: (recordings and one more, products)."""
    varying = [tuple(column) for column in dims.T if len(set(column)) > 1]
    columns = [np.array(column) for column in dict.fromkeys(varying)]
    products: dict[tuple[float, ...], _Floats] = {}
    for count in range(_MOST_FACTORS + 1):
        for factors in itertools.combinations_with_replacement(columns, count):
            product = math.prod(factors, start=np.ones(len(dims)))
            products.setdefault(tuple(product), product)
    return np.stack(list(products.values()), axis=1)


def _by_products(found: _Floats, known: _Floats, wanted: _Floats) -> tuple[_Floats, _Floats]:
    """The least and the most that a constant times one product gives; infinite where none fits."""
    ratios = found[:, :, None] / known[:, None, :]
    fits = np.ptp(ratios, axis=0) <= _NEARLY * ratios[0]
    predicted = ratios[0] * wanted
    lowest = np.where(fits, predicted, np.inf).min(axis=1)
    highest = np.where(fits, predicted, -np.inf).max(axis=1)
    return lowest, np.where(np.isfinite(lowest), highest, np.inf)


def _by_sums(found: _Floats, known: _Floats, wanted: _Floats) -> tuple[float, float]:
    """The same for a constant plus another times one product."""
    if len(found) <= 2:  # any line fits two points
        return np.inf, np.inf
    first, last = known.argmin(axis=0), known.argmax(axis=0)
    every = np.arange(known.shape[1])
    low, high = known[first, every], known[last, every]
    steps = (found[last] - found[first]) / np.where(high > low, high - low, np.inf)
    starts = found[first] - steps * low
    fits = (np.abs(starts + steps * known - found[:, None]) <= _NEARLY * found[:, None]).all(axis=0)
    predicted: Sequence[float] = (starts + steps * wanted)[fits].tolist()
    return min(predicted, default=np.inf), max(predicted, default=np.inf)
