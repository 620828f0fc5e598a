"""Sizes as expressions of axes: how they are written, and their values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Size = Any
"""A number, the name of an axis, BATCH, or a list of "*" (product), "+" (sum) or "//" (quotient) and its sizes."""

BATCH = "@batch"
"""The number of samples in a batch."""
_OPERATORS = ("*", "+", "//")


def compute_size(size: Size, sizes: Mapping[str, int], batch: int = 0) -> int:
    """Compute a size from those of the axes."""
    if isinstance(size, str):
        return batch if size == BATCH else sizes[size]
    if isinstance(size, int):
        return size
    operator, *parts = size
    computed = [compute_size(part, sizes, batch) for part in parts]
    if operator == "+":
        return sum(computed)
    return computed[0] // computed[1] if operator == "//" else math.prod(computed)


def list_names(sizes: Any, sums: Mapping[str, Sequence[Sequence[Any]]] = MappingProxyType({})) -> Iterator[str]:
    """Yield the axes and sums in sizes; with `sums`, their axes in place of them."""
    if isinstance(sizes, str):
        if sizes in sums:
            yield from list_names(sums[sizes])
        elif sizes not in _OPERATORS and sizes != BATCH:
            yield sizes
    elif isinstance(sizes, (list, tuple)):
        for size in sizes:
            yield from list_names(size, sums)


def rename_axes(size: Size, names: Mapping[str, str]) -> Size:
    """A size, or several, with other names of axes and sums; those without a new name keep theirs."""
    if isinstance(size, (list, tuple)):
        return [rename_axes(part, names) for part in size]
    return names.get(size, size)
