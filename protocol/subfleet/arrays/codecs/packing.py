"""Packs small numbers, and sets of positions, into few bytes of predictable size."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ProtocolError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

_BLOCK_VALUES = 8192
"""Packed at once. A multiple of 8, so that every block but the last ends with a whole byte."""


def count_packed_bytes(count: int, bits: int) -> int:
    """Compute the size of packed numbers."""
    return -(-count * bits // 8)


def pack(numbers: Bytes | Integers, bits: int) -> Bytes:
    """Pack numbers from 0 to below 2**bits one after the other, highest bit first."""
    packed = np.empty(count_packed_bytes(len(numbers), bits), np.uint8)
    shifts = np.arange(bits - 1, -1, -1)
    for start in range(0, len(numbers), _BLOCK_VALUES):
        block = numbers[start : start + _BLOCK_VALUES, None] >> shifts & 1
        first = start * bits // 8
        packed[first : first + count_packed_bytes(len(block), bits)] = np.packbits(block.astype(np.bool_))
    return packed


def unpack(packed: Bytes, bits: int, count: int) -> Bytes | Integers:
    """Unpack numbers; `packed` has the size that `count_packed_bytes` computes."""
    numbers = np.empty(count, np.uint8 if bits <= 8 else np.int64)
    shifts = np.arange(bits - 1, -1, -1)
    for start in range(0, count, _BLOCK_VALUES):
        size, first = min(_BLOCK_VALUES, count - start), start * bits // 8
        block = np.unpackbits(packed[first : first + count_packed_bytes(size, bits)], count=size * bits)
        numbers[start : start + size] = (block.reshape(size, bits).astype(np.int64) << shifts).sum(axis=1)
    return numbers


def count_marks_bytes(count: int, size: int) -> int:
    """Compute the size of packed marks."""
    if count == size:
        return 0
    return count_packed_bytes(size, 1) if _is_dense(count, size) else _count_sparse_bytes(count, size)


def pack_marks(marks: Marks) -> Bytes:
    """Pack the marked positions: a bitmap if there are many, else Elias-Fano; nothing if all are marked.

    Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974: the lowest bits of
    each position as they are, the others as a bitmap in which the i-th position sets bit (its high part + i). That
    takes less than 3 + log2(size / marks) bits per mark.
    """
    count, size = int(np.count_nonzero(marks)), len(marks)
    if count == size:
        return np.empty(0, np.uint8)
    if _is_dense(count, size):
        return np.packbits(marks)
    positions = np.flatnonzero(marks)
    low = _pack_low_bits(count, size)
    high = _mark((positions >> low) + np.arange(count), _pack_high_bits(count, size))
    return np.concatenate([np.packbits(high), pack(positions & ((1 << low) - 1), low)])


def unpack_marks(packed: Bytes, count: int, size: int) -> Marks:
    """Unpack marks; `packed` has the size that `count_marks_bytes` computes.

    Raises:
        ProtocolError: the bytes hold another number of marks, a repeated mark, or one beyond the end.
    """
    if count == size:
        return np.ones(size, np.bool_)
    if _is_dense(count, size):
        return _check_count(np.unpackbits(packed, count=size).view(np.bool_), count)
    low, high = _pack_low_bits(count, size), _pack_high_bits(count, size)
    split = count_packed_bytes(high, 1)
    marked = np.flatnonzero(_check_count(np.unpackbits(packed[:split], count=high).view(np.bool_), count))
    positions = (marked - np.arange(count) << low) + unpack(packed[split:], low, count)
    if positions[-1] >= size or (positions[1:] <= positions[:-1]).any():
        raise ProtocolError(f"packed positions must be strictly increasing and below {size}")
    return _mark(positions, size)


def _check_count(marks: Marks, count: int) -> Marks:
    marked = int(np.count_nonzero(marks))
    if marked != count:
        raise ProtocolError(f"the number of packed marks is {marked}, but must be {count}")
    return marks


def _mark(positions: Integers, size: int) -> Marks:
    marks = np.zeros(size, np.bool_)
    marks[positions] = True
    return marks


def _is_dense(count: int, size: int) -> bool:
    return count_packed_bytes(size, 1) <= _count_sparse_bytes(count, size)


def _count_sparse_bytes(count: int, size: int) -> int:
    return count_packed_bytes(_pack_high_bits(count, size), 1) + count_packed_bytes(count, _pack_low_bits(count, size))


def _pack_low_bits(count: int, size: int) -> int:
    return (size // count).bit_length() - 1


def _pack_high_bits(count: int, size: int) -> int:
    return (size - 1 >> _pack_low_bits(count, size)) + count
