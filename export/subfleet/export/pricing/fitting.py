"""What a segment takes at sizes that were not recorded, from recordings of it at other sizes.

The size of a block is a product of a constant and some of the local axes' sizes, now and then plus a constant: that of
a tensor's dimensions. So the blocks of a few recordings tell which axes. Which form a lowering or a kernel chooses
depends on thresholds for such products: of all products by which the recorded forms lie apart, each must tell the same
form. Where either is open, or what is asked for lies beyond all recordings, there is no answer, and the program itself
must be recorded.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from subfleet.export.memory.formulas import Formula
from subfleet.export.pricing.recording import Event, Segment

__all__ = ["Sizes", "segment_at"]

Sizes = tuple[int, ...]
Form = tuple[Event, ...]
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
    if not any(_within(known, sizes) for known in recorded) or not any(_within(sizes, known) for known in recorded):
        return None
    form = _form_at(recorded, sizes)
    if form is None:
        return None
    alike = {known: segment for known, segment in recorded.items() if segment.events == form}
    if not form:
        return next(iter(alike.values()))
    told = _numbers_at(alike, sizes)
    if told is None:
        return None
    first = next(iter(alike.values()))
    numbers = iter(told)
    return Segment(
        events=form,
        sizes=tuple(itertools.islice(numbers, len(first.sizes))),
        weight=max(segment.weight for segment in alike.values()),
        formulas=tuple(
            Formula(kind=formula.kind, numbers=tuple(itertools.islice(numbers, len(formula.numbers))))
            for formula in first.formulas
        ),
    )


def _form_at(recorded: Mapping[Sizes, Segment], sizes: Sizes) -> Form | None:
    """The one form that every product tells by which the recorded forms lie apart."""
    forms = [segment.events for segment in recorded.values()]
    different = list(dict.fromkeys(forms))
    if len(different) == 1:
        return different[0]
    terms = _terms(np.array([*recorded, sizes], dtype=np.float64))
    known, wanted = terms[:-1], terms[-1]
    of_form = [np.array([form == other for other in forms]) for form in different]
    least = np.stack([known[rows].min(axis=0) for rows in of_form])
    most = np.stack([known[rows].max(axis=0) for rows in of_form])
    order = least.argsort(axis=0)
    in_order = np.take_along_axis(least, order, axis=0)[1:] > np.take_along_axis(most, order, axis=0)[:-1]
    apart = in_order.all(axis=0)
    tells = (least <= wanted) & (wanted <= most)
    told = {different[place] for place in range(len(different)) if tells[place, apart].all()} if apart.any() else set()
    return told.pop() if told else None


def _within(smaller: Sizes, larger: Sizes) -> bool:
    return all(a <= b for a, b in zip(smaller, larger, strict=True))


def _numbers_at(recorded: Mapping[Sizes, Segment], sizes: Sizes) -> tuple[int, ...] | None:
    """The blocks' sizes, and after them the numbers of formulas; None where they are open."""
    terms = _terms(np.array([*recorded, sizes], dtype=np.float64))
    known, wanted = terms[:-1], terms[-1]
    found = np.array([_numbers_of(segment) for segment in recorded.values()], dtype=np.float64)
    lowest, highest = _by_products(found, known, wanted)
    for place in np.flatnonzero(np.isinf(highest)):
        lowest[place], highest[place] = _by_sums(found[:, place], known, wanted)
    count = len(next(iter(recorded.values())).sizes)
    if not np.isfinite(highest).all() or float((highest - lowest)[:count].sum()) > _OPEN_BYTES:
        return None
    if (highest - lowest > _NEARLY * highest)[count:].any():  # a little may decide
        return None
    return tuple(math.ceil(size - _NEARLY * size) for size in highest)


def _numbers_of(segment: Segment) -> tuple[int, ...]:
    return (*segment.sizes, *itertools.chain.from_iterable(formula.numbers for formula in segment.formulas))


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
