"""What settings say of each block: the number in its name, and sizes that are given for sections or for blocks."""

from typing import Protocol

OF_SECTIONS_OR_BLOCKS = ("hidden_widths", "squeezed_widths", "heads")
"""Settings that have one number for each section or one for each block."""

OF_BLOCKS = ("layer_widths",)
"""Settings that have one number for each block or none at all."""


class Deep(Protocol):
    """Settings of a network whose sections have blocks."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section."""


def block_numbers(record: Deep) -> tuple[tuple[int, ...], ...]:
    """Of each section the numbers in its blocks' names, in network order.

    They are the record's `block_numbers`; blocks are counted from 0 where those are empty, or no setting of its family.
    """
    named: tuple[tuple[int, ...], ...] = getattr(record, "block_numbers", ())
    return named or tuple(tuple(range(depth)) for depth in record.depths)


def encode_block_numbers(numbers: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The setting that gives these numbers: empty where blocks are counted, so that one network has one record."""
    return () if all(own == tuple(range(len(own))) for own in numbers) else numbers


def expand_to_blocks(values: tuple[int, ...], depths: tuple[int, ...]) -> tuple[int, ...]:
    """What each block has, of numbers that are given for each section or for each block; none of none."""
    if len(values) in {0, sum(depths)}:
        return values
    return tuple(value for value, depth in zip(values, depths, strict=True) for _ in range(depth))
