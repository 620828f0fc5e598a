"""ONNX Runtime's arena: where its blocks lie, and which pages of it a device's memory really holds.

The arena (`BFCArena` in ONNX Runtime's sources, after TensorFlow's allocator of the same name) takes regions from the
system and cuts blocks from them: the smallest free block that fits, halved where it is twice as large, joined with its
free neighbours when it is given back. A region is twice as large as the one before; the system holds only those of its
pages that were written once. So the order of requests alone says how much memory the arena takes.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.export.memory.blocks import Request

__all__ = ["Arena", "arena_after"]

_ROUND_BYTES = 256
_FIRST_REGION_BYTES = 2**20
_LARGEST_WASTE_BYTES = 128 * 2**20
_BIN_COUNT = 21
_ENTRY_BYTES = 8
"""A region has a table, all written, with one entry for each place in it where a block may begin."""
PAGE_BYTES = 4096
_HEADER_BYTES = 64
"""A region begins this far into its first page: after the C library's header, on the alignment that is asked for."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """A part of a region; its neighbours are keys of the arena's blocks."""

    size_bytes: int
    used: bool
    before: int | None
    after: int | None


class Arena:
    """An arena without memory: it only keeps book. An address is a region's start plus an offset in it."""

    def __init__(self) -> None:
        self._next_region_bytes = _FIRST_REGION_BYTES
        self._next_start = 0
        self._region_sizes: list[int] = []
        self._blocks: dict[int, _Block] = {}
        self._free: list[list[tuple[int, int]]] = [[] for _ in range(_BIN_COUNT)]
        self._touched: dict[int, npt.NDArray[np.bool_]] = {}
        self._starts: list[int] = []

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that were written so far, and of the regions' tables; none goes back between steps."""
        pages = sum(int(pages.sum()) for pages in self._touched.values())
        return pages * PAGE_BYTES + sum(self._region_sizes) * _ENTRY_BYTES // _ROUND_BYTES

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Sizes of the regions in the order in which they were taken from the system."""
        return tuple(self._region_sizes)

    def take(self, size_bytes: int) -> int:
        """Take a block and write all of it; its address."""
        rounded = max(-(-size_bytes // _ROUND_BYTES), 1) * _ROUND_BYTES
        address = self._fit(rounded)
        if address is None:
            self._extend(rounded)
            address = self._fit(rounded)
        if address is None:
            raise AssertionError("a new region holds no block of the size that it was made for")
        self._touch(address, size_bytes)
        return address

    def give(self, address: int) -> None:
        """Give a block back."""
        block = self._blocks[address]
        block.used = False
        if block.after is not None and not self._blocks[block.after].used:
            self._join(address, block.after)
        if block.before is not None and not self._blocks[block.before].used:
            before = block.before
            self._join(before, address, first_is_listed=True)
            address = before
        self._list(address)

    def _fit(self, rounded: int) -> int | None:
        for free in self._free[_bin(rounded) :]:
            place = bisect.bisect_left(free, (rounded, -1))
            if place < len(free):
                size_bytes, address = free.pop(place)
                if size_bytes >= 2 * rounded or size_bytes - rounded >= _LARGEST_WASTE_BYTES:
                    self._split(address, rounded)
                self._blocks[address].used = True
                return address
        return None

    def _extend(self, rounded: int) -> None:
        # The region doubles until the block fits; where it fits at once, the next one doubles instead.
        size_bytes = self._next_region_bytes
        while size_bytes < rounded:
            size_bytes *= 2
        self._next_region_bytes = size_bytes if size_bytes > self._next_region_bytes else 2 * size_bytes
        start = self._next_start
        page_count = -(-(size_bytes + _HEADER_BYTES) // PAGE_BYTES)
        # A gap between regions, so that no page belongs to two.
        self._next_start += (page_count + 1) * PAGE_BYTES
        self._starts.append(start)
        self._region_sizes.append(size_bytes)
        self._touched[start] = np.zeros(page_count, np.bool_)
        self._blocks[start] = _Block(size_bytes=size_bytes, used=False, before=None, after=None)
        self._list(start)

    def _touch(self, address: int, size_bytes: int) -> None:
        start = self._starts[bisect.bisect_right(self._starts, address) - 1]
        first = address - start + _HEADER_BYTES
        self._touched[start][first // PAGE_BYTES : (first + max(size_bytes, 1) - 1) // PAGE_BYTES + 1] = True

    def _split(self, address: int, rounded: int) -> None:
        block = self._blocks[address]
        rest = address + rounded
        self._blocks[rest] = _Block(
            size_bytes=block.size_bytes - rounded, used=False, before=address, after=block.after
        )
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.after = rest
        block.size_bytes = rounded
        self._list(rest)

    def _join(self, first: int, second: int, *, first_is_listed: bool = False) -> None:
        self._unlist(first if first_is_listed else second)
        gone = self._blocks.pop(second)
        block = self._blocks[first]
        block.size_bytes += gone.size_bytes
        block.after = gone.after
        if gone.after is not None:
            self._blocks[gone.after].before = first

    def _list(self, address: int) -> None:
        size_bytes = self._blocks[address].size_bytes
        bisect.insort(self._free[_bin(size_bytes)], (size_bytes, address))

    def _unlist(self, address: int) -> None:
        size_bytes = self._blocks[address].size_bytes
        free = self._free[_bin(size_bytes)]
        free.pop(bisect.bisect_left(free, (size_bytes, address)))


def arena_after(requests: Iterable[Request]) -> Arena:
    """The arena after any number of runs: each leaves it as the first one did.

    Args:
        requests: of one run.
    """
    arena = Arena()
    addresses: dict[str, int] = {}
    for name, size_bytes in requests:
        if size_bytes is None:
            arena.give(addresses.pop(name))
        else:
            addresses[name] = arena.take(size_bytes)
    return arena


def _bin(size_bytes: int) -> int:
    """Free blocks are listed by the power of two of their size."""
    return min((size_bytes // _ROUND_BYTES).bit_length() - 1, _BIN_COUNT - 1)
