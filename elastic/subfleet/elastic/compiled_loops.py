"""The loops over large arrays as machine code, where Numba is installed.

PyTorch would write the converted, scaled, rounded and integer numbers to memory in four passes. These loops keep them
in registers, and give the same bits. They release the interpreter's lock, so that threads work side by side. None uses
fast mathematics: it may leave out NaN, and round otherwise than PyTorch does.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["ADDED_TOGETHER", "Loops", "loops_and_threads"]

ADDED_TOGETHER = 4
"""Arrays that are added to a sum at a time; more would need more registers than there are."""
_WORTH_COMPILING = 2**20
"""Elements from which compiling, a second for each process, and threads pay off."""
_BLOCK = 512
"""Elements that are checked, and then added, while they are in the first-level cache."""

_Array = Any
"""A contiguous NumPy array of one dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops.

    Attributes:
        add: (total, values, factors, limit, start, stop) adds round(factor * values) of `ADDED_TOGETHER` float32
            arrays, with as many float factors, to int64 sums, from start to stop. Up to the place that it returns it
            has added all of them, and from there on none; that is stop, or lies before a value that is not finite or
            above the float32 limit.
        move: (old, total, divisor, new, start, stop) writes old + total / divisor, computed in float64, to the float32
            array `new`, and old itself where the int64 total is 0; it returns True.
    """

    add: Callable[[_Array, tuple[_Array, ...], tuple[float, ...], np.float32, int, int], int]
    move: Callable[[_Array, _Array, float, _Array, int, int], bool]


def loops_and_threads(tensors: Sequence[Tensor]) -> tuple[Loops | None, int]:
    """What to work on tensors with: the loops, where there are any, and how many threads.

    No loops, and one thread, for those that are not on the CPU or too small to be worth it; otherwise as many threads
    as `torch.get_num_threads` says.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    if not on_cpu or sum(tensor.numel() for tensor in tensors) < _WORTH_COMPILING:
        return None, 1
    return _compiled(), torch.get_num_threads()


@cache
def _compiled() -> Loops | None:
    """The loops; None where there is no Numba. Each is compiled at its first call in a process."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    compiled = numba.njit(nogil=True, error_model="numpy")
    units = numba.njit(lambda value, factor: np.int64(np.rint(np.float64(value) * factor)))

    def add(total, values, factors, limit, start, stop):  # type: ignore[no-untyped-def]
        f, g, h, k = factors
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            # Sliced first: indices that might be negative would keep the loops from being vectorised.
            a, b, c, d = values[0][first:last], values[1][first:last], values[2][first:last], values[3][first:last]
            block = total[first:last]
            allowed = True
            for i in range(block.size):
                # NaN is not allowed, either.
                allowed &= (abs(a[i]) <= limit) & (abs(b[i]) <= limit) & (abs(c[i]) <= limit) & (abs(d[i]) <= limit)
            if not allowed:
                return first
            for i in range(block.size):
                block[i] += units(a[i], f) + units(b[i], g) + units(c[i], h) + units(d[i], k)
        return stop

    def move(old, total, divisor, new, start, stop):  # type: ignore[no-untyped-def]
        old, total, new = old[start:stop], total[start:stop], new[start:stop]
        for i in range(new.size):
            moved = np.float32(np.float64(old[i]) + np.float64(total[i]) / divisor)
            new[i] = moved if total[i] != 0 else old[i]
        return True

    return Loops(add=compiled(add), move=compiled(move))
