"""The elements that a submodel holds of a tensor, as contiguous rows: what the compiled loops add to.

A map keeps some indices of each factor of a tensor. The factors after the last one that is cut are contiguous; so are,
in the submodel's own tensor, all kept indices of that last one. They are a row, and the rows of a tensor differ in
where they begin only. So a region takes a few numbers for each index that it keeps, and not for each element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    cut = [dim for dim, own in enumerate(runs) if own[0] != (0, sizes[dim])]
    if not sizes or not cut or cut[-1] == 0:
        whole = [(0, 1)] if not sizes else runs[0]
        stride = strides[0] if sizes else 1
        starts, firsts, lengths = _list_whole_rows([(start * stride, count * stride) for start, count in whole], chunk)
        return _make_rows(starts, firsts, lengths, _NO_PARTS, borders)
    last = cut[-1]
    inner = np.array(runs[last], np.int64) * strides[last]
    firsts = np.concatenate([[0], np.cumsum(inner[:, 1])])
    starts = np.zeros(1, np.int64)
    for own, stride in zip(runs[:last], strides, strict=False):
        indices = np.concatenate([np.arange(start, start + count) for start, count in own])
        starts = np.add.outer(starts, indices * stride).reshape(-1)
    order, length = np.argsort(starts, kind="stable"), int(firsts[-1])
    starts, begins = starts[order], np.arange(len(starts))[order] * length
    if len(inner) > 1:
        parts = (inner[:, 0], firsts[:-1], inner[:, 1])
        return _make_rows(starts, begins, np.full(len(starts), length), parts, borders)
    cuts = np.arange(0, length, LONGEST_ROW)
    lengths = np.tile(np.minimum(length - cuts, LONGEST_ROW), len(starts))
    starts, begins = (np.add.outer(own, cuts).reshape(-1) for own in (starts + inner[0, 0], begins))
    return _make_rows(starts, begins, lengths, _NO_PARTS, borders)


def _make_rows(
    starts: _Numbers, firsts: _Numbers, lengths: _Numbers, parts: tuple[_Numbers, _Numbers, _Numbers], borders: _Numbers
) -> RegionRows:
    chunks = tuple(np.searchsorted(starts, borders).tolist())
    return RegionRows(starts=starts, firsts=firsts, lengths=lengths, parts=parts, chunks=chunks)


def find_chunk(shape: Sequence[int], least: int) -> int:
    """The number of elements of whole indices of a tensor's first dimension, about `least` if these are small."""
    row = math.prod(shape[1:])
    return row * max(1, least // row)


def _find_runs(index: Any) -> list[tuple[int, int]]:
    """The first index of each run of consecutive ones, and its length, in order."""
    if isinstance(index, slice):
        return [(index.start, index.stop - index.start)]
    indices = index.reshape(-1).numpy()
    edges = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[start]), stop - start) for start, stop in pairwise(edges)]


def _list_whole_rows(runs: Sequence[tuple[int, int]], chunk: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Starts, firsts and lengths of rows: of runs of elements, which are cut at the borders of chunks."""
    begun = np.cumsum([0, *(count for _, count in runs)])
    # In the order of the tensor.
    cut = [_cut(start, start + count, chunk) for start, count in sorted(runs)]
    moved = [begun[place] - start for start, place in sorted((start, place) for place, (start, _) in enumerate(runs))]
    starts = np.concatenate([edges[:-1] for edges in cut])
    firsts = np.concatenate([edges[:-1] + by for edges, by in zip(cut, moved, strict=True)])
    return starts, firsts, np.concatenate([np.diff(edges) for edges in cut])


def _cut(start: int, stop: int, chunk: int) -> _Numbers:
    """The borders of the rows of a run, with both of its ends."""
    chunks, rows = np.arange(start // chunk * chunk, stop, chunk), np.arange(0, chunk, LONGEST_ROW)
    borders = np.add.outer(chunks, rows).reshape(-1)
    return np.concatenate([[start], borders[(borders > start) & (borders < stop)], [stop]])
