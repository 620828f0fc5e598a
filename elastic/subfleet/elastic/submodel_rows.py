"""The elements that a submodel holds of a network's tensors, as rows: what the compiled loops read.

A map keeps some indices of each factor of a tensor. The factors after the last one that is cut are contiguous; so are,
in the submodel's own tensor, all kept indices of that last one. They are a row, and the rows of a tensor differ in
where they begin only. So a tensor takes a few numbers, and the indices of an axis are listed once for all tensors.
Where several factors come before the last one that is cut, their combinations are listed.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subfleet.elastic.maps import Gather, KeptIndices, TensorMap
from subfleet.elastic.sum_layout import Numbers, SumLayout, TensorPlace, join_indices


class Entry(NamedTuple):
    """Rows of a tensor.

    Attributes:
        first: the first pair of its list.
        last: the one after the last.
        start: the element in the block of sums from which rows are counted.
        step: elements from the row with an index to that with the next one.
        origin: element of the first row in the submodel's flat tensor.
        length: elements of a row there.
        first_run: the first run of each row, in indices.
        last_run: the one after the last.
        stride: elements of such an index.
    """

    first: int
    last: int
    start: int
    step: int
    origin: int
    length: int
    first_run: int
    last_run: int
    stride: int


ENTRY = np.dtype([(name, np.int64) for name in Entry._fields])
"""An entry in an array, as the loops read it."""


class SubmodelRows(NamedTuple):
    """Rows of all tensors of a submodel, or of several.

    Attributes:
        firsts: (tensors + 1,): the first entry of each tensor of the layout, and the number of entries. A tensor that
            the submodel lacks, or that rows cannot describe, has none. Of several submodels: one for each.
        entries: (entries,) of `ENTRY`.
        lists: (n, 2): indices of rows, ascending in each list, and their places in the submodel's order.
        runs: (n, 2): the first index of each run of consecutive ones in a row, and their number.
    """

    firsts: Numbers
    entries: npt.NDArray[np.void]
    lists: Numbers
    runs: Numbers


def describe_rows(maps: Mapping[str, TensorMap], layout: SumLayout) -> SubmodelRows:
    """Describe the rows of maps by the names of their tensors in the layout."""
    firsts: list[int] = []
    entries: list[Entry] = []
    lists, runs = _Arrays(), _Arrays()
    runs.place(None, lambda: np.array([(0, 1)]))
    for name, place in layout.places.items():
        firsts.append(len(entries))
        tensor_map = maps.get(name)
        if isinstance(tensor_map, Gather):
            entries += _list_entries(tensor_map, place, lists, runs)
    return SubmodelRows(
        firsts=np.array([*firsts, len(entries)]),
        entries=np.array(entries, ENTRY),
        lists=lists.join(),
        runs=runs.join(),
    )


class _Arrays:
    """Arrays of pairs that entries share, one after another."""

    def __init__(self) -> None:
        self._arrays: list[Numbers] = []
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._length = 0

    def place(self, key: Hashable, make: Callable[[], Numbers]) -> tuple[int, int]:
        """The first pair of an array and the one after the last; equal keys share an array."""
        if key not in self._places:
            array = make()
            self._arrays.append(array)
            self._places[key] = self._length, self._length + len(array)
            self._length += len(array)
        return self._places[key]

    def join(self) -> Numbers:
        """All arrays."""
        return np.concatenate([np.zeros((0, 2), np.int64), *self._arrays])


def _list_entries(tensor_map: Gather, place: TensorPlace, lists: _Arrays, runs: _Arrays) -> Iterator[Entry]:
    kept, last = tensor_map.kept, tensor_map.last_cut or 0
    strides = tensor_map.strides
    if not kept:
        yield from _join(range(1), 1, place, lists)
    elif strides[last] % place.cell or (place.chunk < place.size and place.chunk % strides[0]):
        return  # rows would cross the border of a chunk, or hold parts of cells
    elif last == 0 and isinstance(kept[0].indices, range):
        yield from _join(kept[0].indices, strides[0], place, lists)
    elif last == 0 and place.size > place.chunk:
        rows = lists.place(kept[0], lambda: _order(kept[0].numbers))
        yield Entry(*rows, place.start, strides[0], 0, strides[0], 0, 1, strides[0])
    else:
        in_row = runs.place(kept[last], lambda: kept[last].runs)
        length, stride = len(kept[last].indices) * strides[last], strides[last]
        if last == 0:
            rows, step = lists.place(1, lambda: _order(np.arange(1))), 0
        elif last == 1:
            rows, step = lists.place(kept[0], lambda: _order(kept[0].numbers)), strides[0]
        else:
            outer = kept[:last]
            rows, step = lists.place((outer, strides), lambda: _order(_combine(outer, strides))), 1
        yield Entry(*rows, place.start, step, 0, length, *in_row, stride)


def _join(indices: range, stride: int, place: TensorPlace, lists: _Arrays) -> Iterator[Entry]:
    """Rows of consecutive elements: of several indices where these are small."""
    begin, size, row = indices.start * stride, len(indices) * stride, join_indices(stride)
    if place.chunk < place.size and (begin % row or place.chunk % row):
        row = stride
    count, rest = divmod(size, row)
    for first, rows, length in ((0, count, row), (count * row, 1, rest)):
        if rows and length:
            own = lists.place(rows, lambda rows=rows: _order(np.arange(rows)))  # type: ignore[misc]
            yield Entry(*own, place.start + begin + first, row, first, length, 0, 1, length)


def _combine(outer: Sequence[KeptIndices], strides: Sequence[int]) -> Numbers:
    """The first elements of all combinations of indices of several factors, in the submodel's order."""
    numbers = np.zeros(1, np.int64)
    for own, stride in zip(outer, strides, strict=False):
        numbers = np.add.outer(numbers, own.numbers * stride).reshape(-1)
    return numbers


def _order(numbers: Numbers) -> Numbers:
    """(n, 2): ascending numbers and their places."""
    order = np.argsort(numbers, kind="stable")
    pairs = np.empty((len(numbers), 2), np.int64)
    pairs[:, 0], pairs[:, 1] = numbers[order], order
    return pairs


def join_rows(submodels: Sequence[SubmodelRows]) -> SubmodelRows:
    """The rows of several submodels; `firsts` is (submodels, tensors + 1)."""
    firsts, entries, counts = [], [], np.zeros(3, np.int64)
    for own in submodels:
        moved = own.entries.copy()
        for name, count in (("first", 1), ("last", 1), ("first_run", 2), ("last_run", 2)):
            moved[name] += counts[count]
        firsts.append(own.firsts + counts[0])
        entries.append(moved)
        counts += (len(own.entries), len(own.lists), len(own.runs))
    return SubmodelRows(
        firsts=np.stack(firsts),
        entries=np.concatenate(entries),
        lists=np.concatenate([own.lists for own in submodels]),
        runs=np.concatenate([own.runs for own in submodels]),
    )
