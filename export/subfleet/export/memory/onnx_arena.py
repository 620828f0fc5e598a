"""Simulates ONNX Runtime's arena: the positions of its blocks, and the pages that a device's memory really holds.

The arena (`BFCArena` in ONNX Runtime's sources, after TensorFlow's allocator of that name) takes regions from the
system and cuts blocks from them: the smallest free block that fits, split if it is twice as large, and merged with free
neighbours when it is freed. A region is twice as large as the one before, up to 1 GiB or what a block needs; the system
only holds those of its pages that were written. So the order of requests determines the memory that the arena takes.
"""

import bisect
from collections.abc import Iterable

import numpy as np

from subfleet.export.memory.blocks import BlockRequest

_ROUND_BYTES = 256
_FIRST_REGION_BYTES = 2**20
_LARGEST_DOUBLED_BYTES = 2**30
_LARGEST_WASTE_BYTES = 128 * 2**20
_ENTRY_BYTES = 8
"""A region has a table with one entry for each position where a block may begin; all of it is written."""
PAGE_BYTES = 4096
_HEADER_BYTES = 64
"""A region begins at this offset in its first page: after the C library's header, at the requested alignment."""


class Arena:
    """A simulated arena without memory. An address is a region's start plus an offset in it."""

    def __init__(self) -> None:
        self._next_region_bytes = _FIRST_REGION_BYTES
        self._region_sizes: list[int] = []
        self._used: dict[int, int] = {}  # blocks' sizes by address
        self._free: dict[int, int] = {}  # likewise
        self._free_by_size: list[tuple[int, int]] = []
        self._free_by_end: dict[int, int] = {}
        self._written = np.zeros(0, np.bool_)  # by page

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that were written so far, and of the regions' tables; none are returned between steps."""
        return int(self._written.sum()) * PAGE_BYTES + sum(self._region_sizes) * _ENTRY_BYTES // _ROUND_BYTES

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Sizes of the regions in the order in which they were taken from the system."""
        return tuple(self._region_sizes)

    def allocate(self, size_bytes: int) -> int:
        """Take a block, write all of it, and return its address."""
        rounded = max(-(-size_bytes // _ROUND_BYTES), 1) * _ROUND_BYTES
        if not self._free_by_size or self._free_by_size[-1][0] < rounded:
            self._extend(rounded)
        block_bytes, address = self._free_by_size[bisect.bisect_left(self._free_by_size, (rounded, -1))]
        self._remove_free(address)
        if block_bytes >= 2 * rounded or block_bytes - rounded >= _LARGEST_WASTE_BYTES:
            self._add_free(address + rounded, block_bytes - rounded)
            block_bytes = rounded
        self._used[address] = block_bytes
        first = address + _HEADER_BYTES
        self._written[first // PAGE_BYTES : (first + max(size_bytes, 1) - 1) // PAGE_BYTES + 1] = True
        return address

    def free(self, address: int) -> None:
        """Free a block."""
        size_bytes = self._used.pop(address)
        if address + size_bytes in self._free:
            size_bytes += self._remove_free(address + size_bytes)
        if address in self._free_by_end:
            address = self._free_by_end[address]
            size_bytes += self._remove_free(address)
        self._add_free(address, size_bytes)

    def _extend(self, rounded: int) -> None:
        # The region doubles until the block fits; if it fits at once, the next region doubles instead.
        size_bytes = self._next_region_bytes
        while size_bytes < rounded:
            size_bytes *= 2
        fits = size_bytes == self._next_region_bytes
        self._next_region_bytes = min(2 * size_bytes, _LARGEST_DOUBLED_BYTES) if fits else size_bytes
        self._region_sizes.append(size_bytes)
        self._add_free(len(self._written) * PAGE_BYTES, size_bytes)
        # A gap between regions, so that they share no page and their blocks are never neighbours.
        page_count = -(-(size_bytes + _HEADER_BYTES) // PAGE_BYTES) + 1
        self._written = np.concatenate([self._written, np.zeros(page_count, np.bool_)])

    def _add_free(self, address: int, size_bytes: int) -> None:
        self._free[address] = size_bytes
        self._free_by_end[address + size_bytes] = address
        bisect.insort(self._free_by_size, (size_bytes, address))

    def _remove_free(self, address: int) -> int:
        size_bytes = self._free.pop(address)
        del self._free_by_end[address + size_bytes]
        self._free_by_size.pop(bisect.bisect_left(self._free_by_size, (size_bytes, address)))
        return size_bytes


def simulate_arena(requests: Iterable[BlockRequest]) -> Arena:
    """Return the arena after any number of runs: each leaves it as the first one did.

    Args:
        requests: the requests of one run.
    """
    arena = Arena()
    addresses: dict[str, int] = {}
    for name, size_bytes in requests:
        if size_bytes is None:
            arena.free(addresses.pop(name))
        else:
            addresses[name] = arena.allocate(size_bytes)
    return arena
