"""The elements that a submodel holds of a tensor, as contiguous rows: what the compiled loops add to.

A map keeps some indices of each factor of a tensor. The factors after the last one that is cut are contiguous; so are,
in the submodel's own tensor, all kept indices of that last one. They are a row, and the rows of a tensor differ in
where they begin only. So a region takes a few numbers for each index that it keeps, and not for each element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.elastic.maps import Gather

LONGEST_ROW = 512
"""Elements of a whole row, which then stays in the first-level cache between its check and its addition."""

_Numbers = npt.NDArray[np.int64]
_NO_PARTS = (np.zeros(0, np.int64),) * 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionRows:
    """Rows in the order of the tensor.

    Attributes:
        starts: first element of each in the flat tensor; for a row in parts, the element to which these are relative.
        firsts: first element of each in the submodel's flat tensor.
        lengths: elements of each in the submodel's tensor.
        parts: first elements in the tensor relative to the row, first elements in the row, and lengths of the parts of
            every row; empty if a row is contiguous in the tensor too.
        chunks: the first row of each chunk of the tensor, and the number of rows.
    """

    starts: _Numbers
    firsts: _Numbers
    lengths: _Numbers
    parts: tuple[_Numbers, _Numbers, _Numbers]
    chunks: tuple[int, ...]

    @property
    def arrays(self) -> tuple[_Numbers, ...]:
        """All arrays, in the order of the attributes."""
        return (self.starts, self.firsts, self.lengths, *self.parts)


def find_rows(tensor_map: Gather, shape: tuple[int, ...], chunk: int) -> RegionRows:
    """The rows of a map.

    Args:
        tensor_map: the map.
        shape: of the tensor.
        chunk: number of elements, a multiple of what an index of the first factor takes; no row lies in two chunks.
    """
    sizes, borders = tensor_map.unfolded or shape, np.arange(0, math.prod(shape) + chunk, chunk)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    runs = [_find_runs(index) for index in tensor_map.index]
    cut = [dim for dim, (_, lengths) in enumerate(runs) if lengths[0] != sizes[dim]]
    if not cut or cut[-1] == 0:
        begins, lengths = (own * strides[0] for own in runs[0]) if sizes else np.array([[0], [1]])
        return _make_rows(*_list_whole_rows(begins, lengths, chunk), _NO_PARTS, borders)
    last = cut[-1]
    begins, lengths = (own * strides[last] for own in runs[last])
    ends, starts = np.cumsum(lengths), np.zeros(1, np.int64)
    for index, stride in zip(tensor_map.index[:last], strides, strict=False):
        starts = np.add.outer(starts, _list_indices(index) * stride).reshape(-1)
    order, length = np.argsort(starts, kind="stable"), int(ends[-1])
    starts, firsts = starts[order], np.arange(len(starts))[order] * length
    if len(begins) > 1:
        parts = (begins, ends - lengths, lengths)
        return _make_rows(starts, firsts, np.full(len(starts), length), parts, borders)
    cuts = np.arange(0, length, LONGEST_ROW)
    lengths = np.tile(np.minimum(length - cuts, LONGEST_ROW), len(starts))
    starts, firsts = (np.add.outer(own, cuts).reshape(-1) for own in (starts + begins[0], firsts))
    return _make_rows(starts, firsts, lengths, _NO_PARTS, borders)


def _make_rows(
    starts: _Numbers, firsts: _Numbers, lengths: _Numbers, parts: tuple[_Numbers, _Numbers, _Numbers], borders: _Numbers
) -> RegionRows:
    chunks = tuple(np.searchsorted(starts, borders).tolist())
    return RegionRows(starts=starts, firsts=firsts, lengths=lengths, parts=parts, chunks=chunks)


def find_chunk(shape: Sequence[int], least: int) -> int:
    """The number of elements of whole indices of a tensor's first dimension, about `least` if these are small."""
    row = math.prod(shape[1:])
    return row * max(1, least // row)


def _list_indices(index: Any) -> _Numbers:
    indices: _Numbers = np.arange(index.start, index.stop) if isinstance(index, slice) else index.reshape(-1).numpy()
    return indices


def _find_runs(index: Any) -> tuple[_Numbers, _Numbers]:
    """The first index of each run of consecutive ones, and its length, in order."""
    if isinstance(index, slice):
        return np.array([index.start]), np.array([index.stop - index.start])
    indices = _list_indices(index)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(indices) != 1) + 1, [len(indices)]])
    return indices[edges[:-1]], np.diff(edges)


def _list_whole_rows(begins: _Numbers, lengths: _Numbers, chunk: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Starts, firsts and lengths of rows: of runs of elements in the order of the tensor, which end with a chunk."""
    order, firsts = np.argsort(begins, kind="stable"), np.cumsum(lengths) - lengths
    rows = begins[order], firsts[order], lengths[order]
    return _cut(*_cut(*rows, chunk), LONGEST_ROW)


def _cut(starts: _Numbers, firsts: _Numbers, lengths: _Numbers, size: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Cut rows where an element is a multiple of `size`."""
    counts = (starts + lengths - 1) // size - starts // size + 1
    own = np.repeat(np.arange(len(starts)), counts)
    borders = (starts // size)[own] + np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    new = np.maximum(starts[own], borders * size)
    ends = np.minimum((starts + lengths)[own], (borders + 1) * size)
    return new, firsts[own] + new - starts[own], ends - new
