"""Coders: they encode and decode the values of one tensor.

How many bytes a coder writes follows from the number of values alone. So a budget knows it before anything is trained,
and a reader checks it before it takes any memory.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from subfleet.arrays.codecs.packing import (
    Bytes,
    Marks,
    count_marks_bytes,
    count_packed_bytes,
    pack,
    pack_marks,
    unpack,
    unpack_marks,
)
from subfleet.protocol.errors import ProtocolError, TrainingError

Floats = npt.NDArray[np.float32]
Uniform = Callable[[int], npt.NDArray[np.float64]]
"""Draws this many numbers from 0 to below 1."""

_FLOAT = np.dtype("<f4")
_BLOCK_VALUES = 2**16
"""Number of values that are quantised at once, because a device has little spare memory."""


class Coder(Protocol):
    """Encodes and decodes the values of one tensor."""

    def count_bytes(self, size: int) -> int:
        """Compute the size of encoded values."""
        ...

    def encode(self, values: Floats, uniform: Uniform) -> Bytes:
        """Encode finite values.

        Args:
            values: (size,).
            uniform: where random numbers come from.

        Raises:
            TrainingError: a value is too large for this encoding.
        """
        ...

    def decode(self, encoded: Bytes, size: int) -> Floats:
        """Decode values.

        Args:
            encoded: bytes of exactly the size that `count_bytes` computes.
            size: number of values.

        Raises:
            ProtocolError: the bytes are not a valid encoding.
        """
        ...


class PlainCoder:
    """Values as they are."""

    def count_bytes(self, size: int) -> int:
        """See `Coder.count_bytes`."""
        return size * _FLOAT.itemsize

    def encode(self, values: Floats, uniform: Uniform) -> Bytes:
        """See `Coder.encode`."""
        del uniform
        return values.astype(_FLOAT).view(np.uint8)

    def decode(self, encoded: Bytes, size: int) -> Floats:
        """See `Coder.decode`."""
        # Copied, as parts of a container lie at any byte.
        return np.frombuffer(encoded.tobytes(), _FLOAT, count=size)


class QsgdCoder:
    """Values as multiples of their bucket's norm over the number of levels, rounded without bias.

    Alistarh et al. 2017, section 3.1: with |v| l / norm = n + p, the level is n + 1 with probability p, else n. So 0
    stays 0. All scales come first, then all levels, each level in whole bits with the number of levels added.

    Args:
        levels: of magnitude above 0, 1 to 127.
        bucket_size: values of a bucket, 1 or more.
    """

    def __init__(self, levels: int, bucket_size: int) -> None:
        self._levels = levels
        self._bucket_size = bucket_size
        self._bits = (2 * levels).bit_length()

    def count_bytes(self, size: int) -> int:
        """See `Coder.count_bytes`."""
        return self._count_scale_bytes(size) + count_packed_bytes(size, self._bits)

    def encode(self, values: Floats, uniform: Uniform) -> Bytes:
        """See `Coder.encode`."""
        scales = np.empty(self._count_buckets(len(values)), _FLOAT)
        codes = np.empty(len(values), np.uint8)
        for here, buckets in self._split_blocks(len(values)):
            block = values[here].astype(np.float64)
            starts = np.arange(0, len(block), self._bucket_size)
            scales[buckets] = self._compute_norms(block, starts)
            codes[here] = self._round(block, self._spread(scales[buckets], len(block)), uniform) + self._levels
        return np.concatenate([scales.view(np.uint8), codes if self._bits == 8 else pack(codes, self._bits)])

    def decode(self, encoded: Bytes, size: int) -> Floats:
        """See `Coder.decode`."""
        split = self._count_scale_bytes(size)
        scales = np.frombuffer(encoded[:split].tobytes(), _FLOAT)
        if not (np.isfinite(scales) & (scales >= 0)).all():
            raise ProtocolError("a scale of quantised values must be a finite number of 0 or more, but one is not")
        codes = encoded[split:] if self._bits == 8 else unpack(encoded[split:], self._bits, size)
        if (codes > 2 * self._levels).any():
            raise ProtocolError(f"a level of quantised values is above {self._levels}, the highest there is")
        values = np.empty(size, np.float32)
        for here, buckets in self._split_blocks(size):
            level = codes[here].astype(np.float64) - self._levels
            values[here] = level * self._spread(scales[buckets], len(level)) / self._levels
        return values

    def _compute_norms(self, block: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> Floats:
        # In float64 no square of a float32 overflows or vanishes, so that no norm is below a magnitude of its bucket.
        norms = np.sqrt(np.add.reduceat(block * block, starts))
        if norms.max() > np.finfo(np.float32).max:
            raise TrainingError("the change of a tensor is too large to be quantised; lower the learning rate")
        return norms.astype(np.float32)

    def _round(
        self, block: npt.NDArray[np.float64], scale: npt.NDArray[np.float64], uniform: Uniform
    ) -> npt.NDArray[np.float64]:
        """Signed levels."""
        exact = self._levels * np.abs(block) / np.where(scale > 0, scale, 1)
        level = np.floor(exact)
        level += uniform(len(block)) < exact - level
        return np.copysign(level, block)

    def _spread(self, scales: Floats, size: int) -> npt.NDArray[np.float64]:
        """Repeat the scale of each bucket for its values."""
        return np.repeat(scales.astype(np.float64), self._bucket_size)[:size]

    def _split_blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Split values and their buckets into blocks."""
        buckets = max(1, _BLOCK_VALUES // self._bucket_size)
        for first in range(0, self._count_buckets(size), buckets):
            yield slice(first * self._bucket_size, (first + buckets) * self._bucket_size), slice(first, first + buckets)

    def _count_buckets(self, size: int) -> int:
        return -(-size // self._bucket_size)

    def _count_scale_bytes(self, size: int) -> int:
        return self._count_buckets(size) * _FLOAT.itemsize


class TopKCoder:
    """The values of largest magnitude (of equal ones the first), after their positions; others decode to 0.

    Args:
        fraction: fraction of the values that is kept, above 0 and at most 1; one at least.
        values: encodes the kept values.
    """

    def __init__(self, fraction: float, values: Coder) -> None:
        self._fraction = fraction
        self._values = values

    def count_bytes(self, size: int) -> int:
        """See `Coder.count_bytes`."""
        count = self._count(size)
        return count_marks_bytes(count, size) + self._values.count_bytes(count)

    def encode(self, values: Floats, uniform: Uniform) -> Bytes:
        """See `Coder.encode`."""
        marks = self._select_largest(values)
        return np.concatenate([pack_marks(marks), self._values.encode(values[marks], uniform)])

    def decode(self, encoded: Bytes, size: int) -> Floats:
        """See `Coder.decode`."""
        count = self._count(size)
        split = count_marks_bytes(count, size)
        marks = unpack_marks(encoded[:split], count, size)
        values = np.zeros(size, np.float32)
        values[marks] = self._values.decode(encoded[split:], count)
        return values

    def _select_largest(self, values: Floats) -> Marks:
        count, magnitudes = self._count(len(values)), np.abs(values)
        # In place and then anew, as a device has next to no room for one more copy.
        magnitudes.partition(len(values) - count)
        least = magnitudes[len(values) - count]
        np.abs(values, out=magnitudes)
        marks: Marks = magnitudes > least
        marks[np.flatnonzero(magnitudes == least)[: count - np.count_nonzero(marks)]] = True
        return marks

    def _count(self, size: int) -> int:
        return min(size, max(1, math.ceil(self._fraction * size)))
