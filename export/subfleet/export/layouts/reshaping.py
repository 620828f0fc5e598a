"""Shapes under a permutation: which reshapes of a permuted tensor need no copy.

A tensor is held in some order of its dimensions: `order[i]` is the logical dimension that lies at place `i`. Dimensions
of size 1 may lie anywhere.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["held_shape", "inverse", "reshape_order", "same_memory"]


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Where each logical dimension lies."""
    positions = [0] * len(order)
    for position, dim in enumerate(order):
        positions[dim] = position
    return tuple(positions)


def held_shape(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The shape in memory of a tensor with a logical shape."""
    return tuple(shape[dim] for dim in order)


def same_memory(shape: Sequence[int], order: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a tensor held in `order` is, as memory, also one held in `other`: sizes of 1 set aside."""
    return [dim for dim in order if shape[dim] != 1] == [dim for dim in other if shape[dim] != 1]


def _segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut both shapes into the shortest runs of dimensions, one after the other, with equal products."""
    runs: list[tuple[list[int], list[int]]] = []
    at_old = at_new = 0
    while at_old < len(old) or at_new < len(new):
        before, after = [], []
        left, right = 1, 1
        if at_old < len(old):
            before.append(at_old)
            left = old[at_old]
            at_old += 1
        if at_new < len(new):
            after.append(at_new)
            right = new[at_new]
            at_new += 1
        while left != right:
            if left < right:
                before.append(at_old)
                left *= old[at_old]
                at_old += 1
            else:
                after.append(at_new)
                right *= new[at_new]
                at_new += 1
        runs.append((before, after))
    return runs


def reshape_order(old: Sequence[int], order: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which the reshaped tensor is held, if the memory can stay as it is; else None.

    Args:
        old: logical shape before.
        order: in which it is held.
        new: logical shape after.
    """
    if math.prod(old) == 0:
        return None
    parts: list[tuple[int, list[int]]] = []
    positions = inverse(order)
    # A run of several dimensions can be cut anew only where they lie side by side and in order.
    solid = [dim for dim in order if old[dim] != 1]
    ranks = {dim: rank for rank, dim in enumerate(solid)}
    ones: list[int] = []
    for before, after in _segments(old, new):
        dims = [dim for dim in before if old[dim] != 1]
        if not dims:
            ones.extend(after)
            continue
        if any(ranks[b] != ranks[a] + 1 for a, b in pairwise(dims)):
            return None
        parts.append((positions[dims[0]], after))
    parts.sort()
    return (*ones, *(dim for _, after in parts for dim in after))
