"""Sizes of memory as people write them: 300M, 1.5Gi."""

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated

from subfleet.protocol.bounds import Condition

_UNITS: Mapping[str, int] = MappingProxyType(
    {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(|[KMG]i?)")
_LARGEST_BYTES = 2**60
_FORM = "a size such as 300M: a number of bytes, or of K, M, G (powers of 1000), Ki, Mi or Gi (powers of 1024)"


def _convert(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    size = Fraction(match[1]) * _UNITS[match[2]] if match else Fraction(0)
    return int(size) if 1 <= size <= _LARGEST_BYTES and size.denominator == 1 else None


Size = Annotated[str, Condition(accepts=lambda text: _convert(text) is not None, words=_FORM)]
MaybeSize = Annotated[str, Condition(accepts=lambda text: not text or _convert(text) is not None, words=_FORM)]
"""A size, or empty."""


def parse_bytes(text: str) -> int:
    """Parse a size: a number, and K, M or G for powers of 1000, Ki, Mi or Gi for powers of 1024.

    Raises:
        ValueError: the text is not a size, or not a whole number of bytes from 1 to 2**60.
    """
    size_bytes = _convert(text)
    if size_bytes is None:
        raise ValueError(f"is {text!r:.40}, but must be {_FORM}")
    return size_bytes
