"""Where the sums of a round lie: one block of memory for all tensors, in chunks, and one for what clients held."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np
import numpy.typing as npt

from subfleet.elastic.axes import factor_sizes
from subfleet.elastic.network import TensorDecl

ADD_CHUNK = 2**18
"""Elements, about: a chunk of the sums fits a core's cache while all updates of a batch pass over it."""

LONGEST_ROW = 2**12
"""Elements of a row where small indices of the first factor are joined."""

Numbers = npt.NDArray[np.int64]

CHUNK = np.dtype([("tensor", np.int64), ("first", np.int64), ("last", np.int64)])
"""A chunk: the position of its tensor, its first element and the one after its last in the block of sums."""
CELLS = np.dtype([("start", np.int64), ("size", np.int64), ("first", np.int64)])
"""The cells of a tensor: its first element in the block of sums, a cell's size, the first in the block of counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor in the blocks.

    Attributes:
        position: among all tensors.
        shape: of the tensor.
        start: its first element in the block of sums.
        cell: elements of a cell: an index of the dimensions that may be cut. Clients hold whole cells.
        cell_shape: of one number for each cell; it broadcasts against the tensor.
        first_cell: its first cell in the block of counts.
        chunk: elements of a chunk, a multiple of what an index of the first factor takes.
    """

    position: int
    shape: tuple[int, ...]
    start: int
    cell: int
    cell_shape: tuple[int, ...]
    first_cell: int
    chunk: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def cells(self) -> slice:
        """Its part of the block of counts."""
        return slice(self.first_cell, self.first_cell + self.size // self.cell)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumLayout:
    """The places of all tensors.

    Attributes:
        places: by name, in order.
        chunks: (n,) of `CHUNK`.
        cells: (tensors,) of `CELLS`.
        size: number of elements of all tensors.
        cell_count: number of cells of all tensors.
    """

    places: dict[str, TensorPlace]
    chunks: npt.NDArray[np.void]
    cells: npt.NDArray[np.void]
    size: int
    cell_count: int


def lay_out(tensors: Sequence[TensorDecl], axis_sizes: Mapping[str, int]) -> SumLayout:
    """Lay out tensors one after another.

    Args:
        tensors: the tensors.
        axis_sizes: sizes of the axes and sums that they run over.
    """
    sizes = [math.prod(decl.shape) for decl in tensors]
    fixed = [_count_fixed_dims(decl) for decl in tensors]
    cells = [math.prod(decl.shape[len(decl.shape) - dims :]) for decl, dims in zip(tensors, fixed, strict=True)]
    starts = list(accumulate(sizes, initial=0))
    first_cells = list(accumulate((size // cell for size, cell in zip(sizes, cells, strict=True)), initial=0))
    places = {
        decl.name: TensorPlace(
            position=position,
            shape=decl.shape,
            start=starts[position],
            cell=cells[position],
            cell_shape=(*decl.shape[: len(decl.shape) - fixed[position]], *[1] * fixed[position]),
            first_cell=first_cells[position],
            chunk=_find_chunk(decl, sizes[position], axis_sizes),
        )
        for position, decl in enumerate(tensors)
    }
    chunks = [
        (place.position, place.start + first, place.start + min(first + place.chunk, place.size))
        for place in places.values()
        for first in range(0, place.size, place.chunk)
    ]
    of_tensors = [(place.start, place.cell, place.first_cell) for place in places.values()]
    return SumLayout(
        places=places,
        chunks=np.array(chunks, CHUNK),
        cells=np.array(of_tensors, CELLS),
        size=starts[-1],
        cell_count=first_cells[-1],
    )


def _count_fixed_dims(decl: TensorDecl) -> int:
    """The number of last dimensions that no submodel cuts, such as the sides of a kernel; never the first one."""
    fixed = takewhile(lambda dim: len(dim) == 1 and isinstance(dim[0], int), reversed(decl.factors[1:]))
    return sum(1 for _ in fixed)


def _find_chunk(decl: TensorDecl, size: int, axis_sizes: Mapping[str, int]) -> int:
    first = factor_sizes(decl.factors[0][:1], axis_sizes) if decl.factors else ()
    row = join_indices(size // math.prod(first))
    return row * max(1, ADD_CHUNK // row)


def join_indices(stride: int) -> int:
    """Elements of a row that joins indices of so many elements where these are small; chunks end with such rows."""
    return stride * max(1, LONGEST_ROW // stride)
