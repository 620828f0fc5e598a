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
"""Arrays of one region that are added to a sum in one pass; more would not fit the registers."""
WORTH_COMPILING = 2**22
"""Number of elements from which threads, and compiling for two seconds in each process, pay off."""

_Array = Any
"""A contiguous NumPy array of one dimension."""


_Rows = tuple[_Array, ...]
"""Starts, firsts, lengths and the three arrays of parts of `subfleet.elastic.region_rows.RegionRows`."""
_Span = tuple[int, int]
"""The first row or element, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops.

    Attributes:
        add: (total, values, factor, limit, rows, span) adds round(factor * values) of a float32 array to int64 sums,
            row by row. Returns the row up to which it added; from there on it added none. That is the end of the span,
            or a row with a value that is not finite or exceeds the float32 limit.
        add_together: the same for tuples of `ADDED_TOGETHER` arrays and as many factors.
        add_number: (total, number, rows) adds an integer to int64 sums, in all rows.
        move: (old, total, (units, clients), (least, scale), new, span) writes old + total / (units / scale), computed
            in float64, to the elements of a span of the float32 array `new`. Units and clients have a number for each
            cell of equally many elements. It writes old where the int64 total is 0, or clients are fewer than least,
            and returns True.
    """

    add: Callable[[_Array, _Array, float, np.float32, _Rows, _Span], int]
    add_together: Callable[[_Array, tuple[_Array, ...], tuple[float, ...], np.float32, _Rows, _Span], int]
    add_number: Callable[[_Array, int, _Rows], None]
    move: Callable[[_Array, _Array, tuple[_Array, ...], tuple[int, float], _Array, _Span], bool]


def loops_and_threads(tensors: Sequence[Tensor], *, passes: int = 1) -> tuple[Loops | None, int]:
    """The compiled loops, if any, and the number of threads for these tensors.

    Without loops and with one thread if the tensors are not on the CPU or too small to pay off, although there are so
    many passes over them; otherwise `torch.get_num_threads()` threads.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    if not on_cpu or passes * sum(tensor.numel() for tensor in tensors) < WORTH_COMPILING:
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
    place = compiled(_place)
    return Loops(
        add=compiled(_make_add(units, place)),
        add_together=compiled(_make_add_together(units, place)),
        add_number=compiled(_add_number),
        move=compiled(_move),
    )


def _place(total, row, numbers, rows):  # type: ignore[no-untyped-def]
    """Add the integers of a row to the elements of its parts."""
    start, parts, firsts, lengths = rows[0][row], rows[3], rows[4], rows[5]
    for part in range(parts.size):
        begin, first, length = start + parts[part], firsts[part], lengths[part]
        # Slices first: indices that may be negative would prevent vectorisation.
        block, own = total[begin : begin + length], numbers[first : first + length]
        for i in range(block.size):
            block[i] += own[i]


def _make_add(units: Any, place: Any) -> Any:
    def add(total, values, factor, limit, rows, span):  # type: ignore[no-untyped-def]
        whole = rows[3].size == 0
        memory = np.empty(0 if whole else rows[2][span[0]], np.int64)  # all rows in parts are as long
        for row in range(span[0], span[1]):
            start, first, length = rows[0][row], rows[1][row], rows[2][row]
            a, allowed = values[first : first + length], True
            for i in range(a.size):
                allowed &= abs(a[i]) <= limit  # NaN fails this comparison, too
            if not allowed:
                return row
            if whole:
                block = total[start : start + length]
                for i in range(block.size):
                    block[i] += units(a[i], factor)
            else:
                for i in range(memory.size):
                    memory[i] = units(a[i], factor)
                place(total, row, memory, rows)
        return span[1]

    return add


def _make_add_together(units: Any, place: Any) -> Any:
    def add_together(total, values, factors, limit, rows, span):  # type: ignore[no-untyped-def]
        f, g, h, k = factors
        whole = rows[3].size == 0
        memory = np.empty(0 if whole else rows[2][span[0]], np.int64)
        for row in range(span[0], span[1]):
            start, first, last = rows[0][row], rows[1][row], rows[1][row] + rows[2][row]
            a, b, c, d = values[0][first:last], values[1][first:last], values[2][first:last], values[3][first:last]
            allowed = True
            for i in range(a.size):
                allowed &= (abs(a[i]) <= limit) & (abs(b[i]) <= limit) & (abs(c[i]) <= limit) & (abs(d[i]) <= limit)
            if not allowed:
                return row
            if whole:
                block = total[start : start + last - first]
                for i in range(block.size):
                    block[i] += units(a[i], f) + units(b[i], g) + units(c[i], h) + units(d[i], k)
            else:
                for i in range(memory.size):
                    memory[i] = units(a[i], f) + units(b[i], g) + units(c[i], h) + units(d[i], k)
                place(total, row, memory, rows)
        return span[1]

    return add_together


def _add_number(total, number, rows):  # type: ignore[no-untyped-def]
    for row in range(rows[0].size):
        start, length = rows[0][row], rows[2][row]
        if rows[3].size == 0:
            block = total[start : start + length]
            for i in range(block.size):
                block[i] += number
        for part in range(rows[3].size):
            begin = start + rows[3][part]
            block = total[begin : begin + rows[5][part]]
            for i in range(block.size):
                block[i] += number


def _move(old, total, counts, limits, new, span):  # type: ignore[no-untyped-def]
    length = old.size // counts[0].size
    for cell in range(span[0] // length, (span[1] - 1) // length + 1):
        first, last = max(span[0], cell * length), min(span[1], (cell + 1) * length)
        before, sums, after = old[first:last], total[first:last], new[first:last]
        enough = counts[1][cell] >= limits[0]
        # Dividing by a power of two is exact.
        divisor = np.float64(max(counts[0][cell], 1)) / limits[1]
        for i in range(after.size):
            moved = np.float32(np.float64(before[i]) + np.float64(sums[i]) / divisor)
            after[i] = moved if enough and sums[i] != 0 else before[i]
    return True
