"""Numbers and marks packed into few bytes: they can be unpacked, and their sizes are as predicted."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.arrays.codecs.packing import (
    Marks,
    count_marks_bytes,
    count_packed_bytes,
    pack,
    pack_marks,
    unpack,
    unpack_marks,
)
from subfleet.protocol.errors import ProtocolError


@examples(25)
@given(bits=st.integers(0, 20), count=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_numbers_come_back(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, count)
    packed = pack(numbers, bits)
    assert len(packed) == count_packed_bytes(count, bits) == math.ceil(count * bits / 8)
    np.testing.assert_array_equal(unpack(packed, bits, count), numbers)


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_numbers_of_several_blocks_come_back(bits: int) -> None:
    numbers = np.arange(3 * 8192 + 5) % 2**bits
    np.testing.assert_array_equal(unpack(pack(numbers, bits), bits, len(numbers)), numbers)


def test_numbers_stand_one_after_the_other_with_the_highest_bit_first() -> None:
    assert pack(np.array([0b101, 0b011, 0b110]), 3).tobytes() == bytes([0b10101111, 0b00000000])


def marks_at(positions: Iterable[int], size: int) -> Marks:
    marks = np.zeros(size, np.bool_)
    marks[list(positions)] = True
    return marks


@pytest.mark.slow
@examples(50)
@given(size=st.integers(1, 3000), fraction=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_marks_come_back(size: int, fraction: float, seed: int) -> None:
    count = max(1, round(fraction * size))
    marks = marks_at(np.random.default_rng(seed).choice(size, count, replace=False), size)
    packed = pack_marks(marks)
    assert len(packed) == count_marks_bytes(count, size)
    # At most a bit per position, and less than 3 bits plus the logarithm of the gaps per mark.
    assert 8 * len(packed) < min(size, count * (3 + math.log2(size / count))) + 16
    np.testing.assert_array_equal(unpack_marks(packed, count, size), marks)


def test_marks_at_either_end_come_back() -> None:
    for positions in ([0], [999_999], [0, 999_999]):
        packed = pack_marks(marks_at(positions, 10**6))
        assert np.flatnonzero(unpack_marks(packed, len(positions), 10**6)).tolist() == positions


def test_marks_everywhere_take_no_bytes() -> None:
    assert count_marks_bytes(7, 7) == len(pack_marks(np.ones(7, np.bool_))) == 0
    assert unpack_marks(np.empty(0, np.uint8), 7, 7).tolist() == [True] * 7


def test_few_marks_are_low_bits_after_a_bitmap_of_the_high_ones() -> None:
    # 100 / 2 leaves 5 low bits; positions 3 and 70 have the high parts 0 and 2, and set bits 0 and 2 + 1.
    assert pack_marks(marks_at([3, 70], 100)).tobytes() == bytes([0b10010000, 0b00011001, 0b10000000])


def test_many_marks_are_a_bitmap() -> None:
    assert pack_marks(marks_at([0, 2, 3, 6], 8)).tobytes() == bytes([0b10110010])


@pytest.mark.parametrize(
    ("packed", "count", "size", "message"),
    [
        ([0b10110010], 3, 8, "the number of packed marks is 4, but must be 3"),
        ([0b10000000, 0b00011001, 0b10000000], 2, 100, "the number of packed marks is 1, but must be 2"),
        ([0b00110000, 0b11111111, 0b11000000], 2, 100, "must be strictly increasing and below 100"),  # 95 and 95
        ([0b10001000, 0b00000111, 0b11000000], 2, 100, "must be strictly increasing and below 100"),  # 0 and 127
    ],
)
def test_invalid_marks_are_refused(packed: list[int], count: int, size: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack_marks(np.array(packed, np.uint8), count, size)
