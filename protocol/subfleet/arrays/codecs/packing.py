"""Small numbers and rising positions in as few bytes as a size that is known beforehand allows."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ProtocolError

__all__ = ["Bytes", "pack", "pack_positions", "packed_bytes", "positions_bytes", "unpack", "unpack_positions"]

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

_BLOCK_VALUES = 8192
"""Packed at once. A multiple of 8, so that every block but the last ends with a whole byte."""


def packed_bytes(count: int, bits: int) -> int:
    """The size of so many numbers of so many bits."""
    return -(-count * bits // 8)


def pack(numbers: Integers, bits: int) -> Bytes:
    """Numbers from 0 up to, not including, 2**bits, one after the other, each with its highest bit first."""
    packed = np.empty(packed_bytes(len(numbers), bits), np.uint8)
    shifts = np.arange(bits - 1, -1, -1)
    for start in range(0, len(numbers), _BLOCK_VALUES):
        block = numbers[start : start + _BLOCK_VALUES, None] >> shifts & 1
        place = start * bits // 8
        packed[place : place + packed_bytes(len(block), bits)] = np.packbits(block.astype(np.bool_))
    return packed


def unpack(packed: Bytes, bits: int, count: int) -> Integers:
    """What was packed; `packed` has the size that `packed_bytes` tells."""
    numbers = np.empty(count, np.int64)
    shifts = np.arange(bits - 1, -1, -1)
    for start in range(0, count, _BLOCK_VALUES):
        size, place = min(_BLOCK_VALUES, count - start), start * bits // 8
        block = np.unpackbits(packed[place : place + packed_bytes(size, bits)], count=size * bits)
        numbers[start : start + size] = (block.reshape(size, bits).astype(np.int64) << shifts).sum(axis=1)
    return numbers


def positions_bytes(count: int, size: int) -> int:
    """The size of so many different positions among so many places."""
    if count == size:
        return 0
    return packed_bytes(size, 1) if _is_dense(count, size) else _sparse_bytes(count, size)


def pack_positions(positions: Integers, size: int) -> Bytes:
    """Rising positions from 0 up to, not including, `size`: a bit for each place where they are many, else Elias-Fano.

    Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974: the lowest bits of
    each position as they are, the others as a bitmap in which the i-th position sets bit (its high part + i). That
    takes less than 3 bits and log2(size / count) a position, whatever the positions are.
    """
    count = len(positions)
    if count == size:
        return np.empty(0, np.uint8)
    if _is_dense(count, size):
        return np.packbits(_marked(positions, size))
    low = _low_bits(count, size)
    high = _marked((positions >> low) + np.arange(count), _high_bits(count, size))
    return np.concatenate([np.packbits(high), pack(positions & ((1 << low) - 1), low)])


def unpack_positions(packed: Bytes, count: int, size: int) -> Integers:
    """What was packed; `packed` has the size that `positions_bytes` tells.

    Raises:
        ProtocolError: the bytes name another number of positions, or one twice, or one that is not there.
    """
    if count == size:
        return np.arange(size)
    if _is_dense(count, size):
        return _counted(np.flatnonzero(np.unpackbits(packed, count=size)), count)
    low, high = _low_bits(count, size), _high_bits(count, size)
    split = packed_bytes(high, 1)
    marked = _counted(np.flatnonzero(np.unpackbits(packed[:split], count=high)), count)
    positions = (marked - np.arange(count) << low) + unpack(packed[split:], low, count)
    if positions[-1] >= size or (positions[1:] <= positions[:-1]).any():
        raise ProtocolError(f"packed positions must rise and stay below {size}, but these do not")
    return positions


def _counted(marked: Integers, count: int) -> Integers:
    if len(marked) != count:
        raise ProtocolError(f"packed positions name {len(marked)} places, but must name {count}")
    return marked


def _marked(places: Integers, size: int) -> npt.NDArray[np.bool_]:
    marks = np.zeros(size, np.bool_)
    marks[places] = True
    return marks


def _is_dense(count: int, size: int) -> bool:
    return packed_bytes(size, 1) <= _sparse_bytes(count, size)


def _sparse_bytes(count: int, size: int) -> int:
    return packed_bytes(_high_bits(count, size), 1) + packed_bytes(count, _low_bits(count, size))


def _low_bits(count: int, size: int) -> int:
    return (size // count).bit_length() - 1


def _high_bits(count: int, size: int) -> int:
    return (size - 1 >> _low_bits(count, size)) + count
