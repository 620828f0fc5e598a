"""Loops over large arrays, compiled if Numba is installed.

PyTorch would write the converted, scaled, rounded and integer numbers to memory in four passes. These loops keep them
in registers and give the same bits. They release the interpreter's lock, so threads run in parallel. They do not use
fast math, which may ignore NaN and round differently than PyTorch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from subfleet.elastic.submodel_rows import SubmodelRows

ADDED_TOGETHER = 4
"""Updates of one submodel that are added to a sum in one pass; more would not fit the registers."""
WORTH_COMPILING = 2**23
"""Number of elements from which threads, and compiling for some seconds in each process, pay off."""
_ANY = 2**62

_Array = Any
"""A contiguous NumPy array."""

GROUP = np.dtype([("submodel", np.int64), ("first", np.int64), ("count", np.int64)])
"""Updates of one submodel that are added together: its position, the first of them, and their number, 1 or 4."""


class Updates(NamedTuple):
    """Updates that are added to sums.

    Attributes:
        groups: (groups,) of `GROUP`.
        addresses: (updates, tensors): of the float32 values of each tensor; 0 if it is not added.
        factors: (updates, tensors): round(value * factor) is added.
        limits: (tensors,): largest absolute values, float32.
    """

    groups: _Array
    addresses: _Array
    factors: _Array
    limits: _Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops.

    Attributes:
        add: (sums, chunks, rows, updates, sign, progress) adds all updates to chunks of the sums, chunk by chunk; rows
            are those of several submodels. It writes to `progress` how many rows it added in each chunk. A row with a
            value that is not finite or exceeds its limit is the last one of a call, which returns False. With sign -1
            it subtracts as many rows in each chunk as `progress` says.
        count: see `count_cells`.
        move: (old, total, (units, clients), (least, scale), new, span) writes old + total / (units / scale), computed
            in float64, to the elements of a span of the float32 array `new`. Units and clients have a number for each
            cell of equally many elements. It writes old where the int64 total is 0, or clients are fewer than least,
            and returns True.
    """

    add: Callable[[_Array, _Array, SubmodelRows, Updates, int, _Array], bool]
    count: Callable[[_Array, _Array, SubmodelRows, _Array], None]
    move: Callable[[_Array, _Array, tuple[_Array, ...], tuple[int, float], _Array, tuple[int, int]], bool]


def loops_for(element_count: int) -> Loops | None:
    """The compiled loops, if so many elements on the CPU pay off and Numba is installed."""
    return compile_loops() if element_count >= WORTH_COMPILING else None


def threads_for(element_count: int) -> int:
    """The number of threads that pay off for so many elements on the CPU."""
    return torch.get_num_threads() if element_count >= WORTH_COMPILING else 1


@cache
def compile_loops() -> Loops | None:
    """The loops, or None without Numba. Each is compiled at its first call in a process."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    compiled = numba.njit(nogil=True, error_model="numpy")
    units = numba.njit(_make_units())
    one, four = (compiled(_make_add_row(compiled(make(units)))) for make in (_make_place_one, _make_place_four))
    entry = compiled(_make_add_entry(compiled(_make_floats_at()), compiled(_find_row), one, four))
    return Loops(
        add=compiled(_make_add(entry)),
        count=compiled(count_cells),
        move=compiled(_move),
    )


def count_cells(counts, tensors, rows, numbers):  # type: ignore[no-untyped-def]
    """Add a number for each tensor to the cells that a submodel holds of it; also runs as it stands.

    Args:
        counts: int64 block of cells.
        tensors: (tensors,) of `subfleet.elastic.sum_layout.CELLS`.
        rows: of the submodel.
        numbers: (tensors,).
    """
    for tensor in range(tensors.size):
        start, size = tensors[tensor]["start"], tensors[tensor]["size"]
        for number in range(rows.firsts[tensor], rows.firsts[tensor + 1] if numbers[tensor] else 0):
            entry = rows.entries[number]
            runs, width = rows.runs[entry["first_run"] : entry["last_run"]], entry["stride"] // size
            low = runs[:, 0].min()
            # A row of the whole width is added faster than one run after another.
            cells = np.zeros(((runs[:, 0] + runs[:, 1]).max() - low) * width, np.int64)
            for run in range(runs.shape[0]):
                begin = (runs[run, 0] - low) * width
                cells[begin : begin + runs[run, 1] * width] = numbers[tensor]
            first = tensors[tensor]["first"] + low * width
            for row in range(entry["first"], entry["last"]):
                begin = first + (entry["start"] + rows.lists[row, 0] * entry["step"] - start) // size
                block = counts[begin : begin + cells.size]
                block += cells


def _make_units() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core.cgutils import get_or_insert_function
    from numba.extending import intrinsic

    @intrinsic
    def to_nearest(context, number):  # type: ignore[no-untyped-def]
        # One instruction for a vector of numbers, where rint and a conversion are two.
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(ir.IntType(64), [ir.DoubleType()])
            return builder.call(get_or_insert_function(builder.module, kind, "llvm.llrint.i64.f64"), arguments)

        return types.int64(types.float64), generate

    def units(value, factor, limit):  # type: ignore[no-untyped-def]
        # NaN fails this comparison, too. A value that is refused adds nothing, so that the others can be undone.
        return to_nearest(np.float64(value) * factor) if abs(value) <= limit else np.int64(0)

    return units


def _make_floats_at() -> Any:
    from numba import carray, types
    from numba.extending import intrinsic

    @intrinsic
    def point(context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.float32)(types.int64), generate

    def floats_at(address, first, count):  # type: ignore[no-untyped-def]
        return carray(point(address + 4 * first), count)

    return floats_at


def _make_add(add_entry: Any) -> Any:
    def add(sums, chunks, rows, updates, sign, progress):  # type: ignore[no-untyped-def]
        for number in range(chunks.size):
            tensor, most, done = chunks[number]["tensor"], progress[number] if sign < 0 else _ANY, 0
            for position in range(updates.groups.size):
                group = updates.groups[position]
                firsts, is_added = rows.firsts[group["submodel"]], updates.addresses[group["first"], tensor] != 0
                for entry in range(firsts[tensor], firsts[tensor + 1] if is_added else 0):
                    where = chunks[number], rows.entries[entry], sign, done, most
                    done = add_entry(sums, rows, updates, group, where)
                    if done < 0 and sign > 0:
                        progress[number] = -done
                        return False
                    done = abs(done)  # a refused row is the last one that is undone
            progress[number] = done
        return True

    return add


def _make_add_entry(floats_at: Any, find_row: Any, add_one: Any, add_four: Any) -> Any:
    """The loop over an entry's rows in a chunk, for one update or four; returns what `_make_add_row` says."""

    def add_entry(sums, rows, updates, group, where):  # type: ignore[no-untyped-def]
        chunk, entry, sign, done, most = where
        tensor, at, length = chunk["tensor"], group["first"], entry["length"]
        addresses, factors, limit = updates.addresses[:, tensor], updates.factors[:, tensor], updates.limits[tensor]
        runs = rows.runs[entry["first_run"] : entry["last_run"]]
        for row in range(find_row(rows.lists, entry, chunk["first"]), entry["last"]):
            start = entry["start"] + rows.lists[row, 0] * entry["step"]
            origin = entry["origin"] + rows.lists[row, 1] * length
            if start >= chunk["last"] or done < 0 or done == most:
                break
            place = start, entry["stride"], done
            a, f = floats_at(addresses[at], origin, length), sign * factors[at]
            if group["count"] == 1:
                done = add_one(sums, (a,), (f,), limit, runs, place)
            else:
                b, g = floats_at(addresses[at + 1], origin, length), sign * factors[at + 1]
                c, h = floats_at(addresses[at + 2], origin, length), sign * factors[at + 2]
                d, k = floats_at(addresses[at + 3], origin, length), sign * factors[at + 3]
                done = add_four(sums, (a, b, c, d), (f, g, h, k), limit, runs, place)
        return done

    return add_entry


def _make_add_row(place: Any) -> Any:
    """The loop over a row: returns the rows done so far with this one, or minus that if a value of it is refused."""

    def add_row(sums, arrays, factors, limit, runs, where):  # type: ignore[no-untyped-def]
        start, stride, done = where
        begin, allowed = 0, True
        for run in range(runs.shape[0]):
            first, length = start + runs[run, 0] * stride, runs[run, 1] * stride
            # Indices that may be negative would prevent vectorisation.
            part = np.uint64(first), np.uint64(begin), np.uint64(length)
            allowed &= place(sums, arrays, part, factors, limit)
            begin += length
        return done + 1 if allowed else -1 - done

    return add_row


def _make_place_one(units: Any) -> Any:
    def place_one(sums, arrays, part, factors, limit):  # type: ignore[no-untyped-def]
        (first, begin, length), a, f = part, arrays[0], factors[0]
        allowed = True
        for i in range(length):
            x = a[begin + i]
            allowed &= abs(x) <= limit
            sums[first + i] += units(x, f, limit)
        return allowed

    return place_one


def _make_place_four(units: Any) -> Any:
    def place_four(sums, arrays, part, factors, limit):  # type: ignore[no-untyped-def]
        (first, begin, length), (a, b, c, d), (f, g, h, k) = part, arrays, factors
        allowed = True
        for i in range(length):
            w, x, y, z = a[begin + i], b[begin + i], c[begin + i], d[begin + i]
            allowed &= (abs(w) <= limit) & (abs(x) <= limit) & (abs(y) <= limit) & (abs(z) <= limit)
            sums[first + i] += units(w, f, limit) + units(x, g, limit) + units(y, h, limit) + units(z, k, limit)
        return allowed

    return place_four


def _find_row(lists, entry, low):  # type: ignore[no-untyped-def]
    """The first row of an entry that begins at an element or after it."""
    first, last = entry["first"], entry["last"]
    while first < last:
        middle = (first + last) // 2
        if entry["start"] + lists[middle, 0] * entry["step"] < low:
            first = middle + 1
        else:
            last = middle
    return first


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
