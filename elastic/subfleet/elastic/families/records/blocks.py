"""Settings of blocks: the numbers in their names, and sizes given for each section or block."""

from typing import Protocol

OF_SECTIONS_OR_BLOCKS = ("hidden_widths", "squeezed_widths", "heads")
"""Settings with one number for each section or one for each block."""

OF_BLOCKS = ("layer_widths",)
"""Settings with one number for each block, or empty."""


class Deep(Protocol):
    """Settings of a network whose sections have blocks."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section."""


def block_numbers(record: Deep) -> tuple[tuple[int, ...], ...]:
    """The numbers in the blocks' names for each section, in network order.

    They are the record's `block_numbers`, or count from 0 if those are empty or not a setting of its family.
    """
    named: tuple[tuple[int, ...], ...] = getattr(record, "block_numbers", ())
    return named or tuple(tuple(range(depth)) for depth in record.depths)


def encode_block_numbers(numbers: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The setting for these numbers: empty if they count from 0, so that each network has a unique record."""
    return () if all(own == tuple(range(len(own))) for own in numbers) else numbers


def expand_to_blocks(values: tuple[int, ...], depths: tuple[int, ...]) -> tuple[int, ...]:
    """Expand numbers that are given for each section or each block to blocks; empty stays empty."""
    if len(values) in {0, sum(depths)}:
        return values
    return tuple(value for value, depth in zip(values, depths, strict=True) for _ in range(depth))
