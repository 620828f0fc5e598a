"""Loops over large arrays, compiled if Numba is installed.

PyTorch would write the converted, scaled, rounded and integer numbers to memory in four passes. These loops keep them
in registers and give the same bits. They release the interpreter's lock, so threads run in parallel. They do not use
fast math, which may ignore NaN and round differently than PyTorch.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ADDED_TOGETHER = 4
"""Arrays that are added to a sum in one pass; more would not fit the registers."""
WORTH_COMPILING = 2**20
"""Number of elements from which threads, and compiling for a second in each process, pay off."""
_BLOCK = 512
"""Elements that are checked and then added while they are in the first-level cache."""

_Array = Any
"""A contiguous NumPy array of one dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops.

    Attributes:
        add: (total, values, factors, limit, start, stop) adds round(factor * values) of `ADDED_TOGETHER` float32
            arrays and as many float factors to int64 sums, from start to stop. Returns the position up to which it
            added all of them; from there on it added none. That is stop, or a position before a value that is not
            finite or exceeds the float32 limit.
        move: (old, total, divisor, new, start, stop) writes old + total / divisor, computed in float64, to the float32
            array `new`, or old itself where the int64 total is 0. Returns True.
    """

    add: Callable[[_Array, tuple[_Array, ...], tuple[float, ...], np.float32, int, int], int]
    move: Callable[[_Array, _Array, float, _Array, int, int], bool]


def loops_and_threads(tensors: Sequence[Tensor]) -> tuple[Loops | None, int]:
    """The compiled loops, if any, and the number of threads for these tensors.

    Without loops and with one thread if the tensors are not on the CPU or too small to pay off; otherwise
    `torch.get_num_threads()` threads.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    if not on_cpu or sum(tensor.numel() for tensor in tensors) < WORTH_COMPILING:
        return None, 1
    return compile_loops(), torch.get_num_threads()


@cache
def compile_loops() -> Loops | None:
    """The loops, or None without Numba. Each is compiled at its first call in a process."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    compiled = numba.njit(nogil=True, error_model="numpy")
    units = numba.njit(lambda value, factor: np.int64(np.rint(np.float64(value) * factor)))

    def add(total, values, factors, limit, start, stop):  # type: ignore[no-untyped-def]
        f, g, h, k = factors
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            # Slices first: indices that may be negative would prevent vectorisation.
            a, b, c, d = values[0][first:last], values[1][first:last], values[2][first:last], values[3][first:last]
            block = total[first:last]
            allowed = True
            for i in range(block.size):
                # NaN fails these comparisons, too.
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
