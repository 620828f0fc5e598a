"""Sizes of blocks that are no product of axes, with the numbers that they follow from, which are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["EITHER", "STRIPES", "Formula"]

EITHER, STRIPES = 0, 1
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A block's size.

    Attributes:
        kind: `EITHER` of two algorithms: what is compared with a limit, the limit, the bytes that are taken above it,
            and those that are taken elsewhere. Or `STRIPES`, a matrix laid out anew: how many of them, rows, columns,
            and to how many columns a stripe is filled up; a row more holds the bias.
        numbers: these, in order.
    """

    kind: int
    numbers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What is taken."""
        return _SIZES[self.kind](*self.numbers)


def _either(wanted: int, limit: int, above_bytes: int, else_bytes: int) -> int:
    return above_bytes if wanted > limit else else_bytes


def _stripes(matrices: int, rows: int, columns: int, stripe: int) -> int:
    return _FLOAT_BYTES * matrices * -(-columns // stripe) * stripe * (rows + 1)


_SIZES: Mapping[int, Callable[..., int]] = MappingProxyType({EITHER: _either, STRIPES: _stripes})
