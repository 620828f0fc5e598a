"""Measures the memory growth of this process.

On Linux the kernel keeps the process's high-water mark (VmHWM), and resets it to the present size when "5" is written
to `clear_refs`. If that file cannot be written (sandboxes), the resident size is sampled at each call instead, so a
peak between two calls is missed; without `/proc`, the growth of `ru_maxrss` is used, which is 0 until the process
exceeds its previous maximum.

Pages of files do not count where the kernel lists them: they are code of libraries, which is mapped when it is first
touched, in pieces that depend on the page cache (1 to 5 MB in the first steps of a runtime). They are shared, and the
kernel drops them if memory is short.

The figures are for the whole process, so only one job may be measured at a time.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from subfleet.device_profiles.process_memory import PROC, read_process_sizes, release_free_memory, reset_high_water
from subfleet.protocol.errors import MemoryLimitError


class GrowthWatch(Protocol):
    """Measures the memory of one training."""

    def measure_held_bytes(self) -> int:
        """Measure the current growth without pages of files."""
        ...

    def growth_bytes(self) -> int:
        """Measure the largest growth so far; 0 if it is not measured."""
        ...

    def check(self) -> None:
        """Compare the growth with its limit; raises MemoryLimitError beyond it."""
        ...


class MemoryWatch:
    """Measures growth since its creation; free memory is returned to the system first.

    Args:
        limit_bytes: the most by which the process may grow.
        proc: the process's folder of the proc file system.
        held_bytes: memory that already exists and counts as growth, such as a session of the previous job.
    """

    def __init__(self, limit_bytes: int, proc: Path = PROC, *, held_bytes: int = 0) -> None:
        release_free_memory()
        self._limit_bytes = limit_bytes
        self._proc, self._peak_field = proc, _start_mark(proc)
        self._growth_bytes = 0
        self._base_bytes, self._base_file_bytes = self._measure_peak()
        self._base_bytes -= held_bytes
        self._base_own_bytes = (self._measure_own_bytes() or 0) - held_bytes

    def measure_held_bytes(self) -> int:
        """Measure the current growth without pages of files; the largest growth if it cannot be read."""
        own_bytes = self._measure_own_bytes()
        return self.growth_bytes() if own_bytes is None else max(own_bytes - self._base_own_bytes, 0)

    def growth_bytes(self) -> int:
        """Measure the largest growth so far, without pages of files that were mapped since."""
        peak_bytes, file_bytes = self._measure_peak()
        mapped_bytes = max(file_bytes - self._base_file_bytes, 0)
        self._growth_bytes = max(self._growth_bytes, peak_bytes - self._base_bytes - mapped_bytes)
        return self._growth_bytes

    def _measure_peak(self) -> tuple[int, int]:
        """The high-water mark, and the present pages of files; 0 of these where the kernel does not list them."""
        if not self._peak_field:
            return _read_largest_bytes(), 0
        sizes = read_process_sizes(self._proc)
        return sizes[self._peak_field], sizes.get("RssFile", 0)

    def _measure_own_bytes(self) -> int | None:
        """Memory without pages of files (with them on kernels before 4.5); None if it cannot be read."""
        with suppress(OSError):
            sizes = read_process_sizes(self._proc)
            return sizes.get("RssAnon", sizes.get("VmRSS"))
        return None

    def check(self) -> None:
        """Compare the growth with the limit.

        Raises:
            MemoryLimitError: the process grew beyond it.
        """
        if self.growth_bytes() > self._limit_bytes:
            raise MemoryLimitError(needed_bytes=self._growth_bytes, limit_bytes=self._limit_bytes)


def _start_mark(proc: Path) -> str:
    """Reset the high-water mark; returns the field to read then, or "" if there is none."""
    with suppress(OSError):
        present = read_process_sizes(proc)
        if reset_high_water(proc) and "VmHWM" in present:
            return "VmHWM"
        if "VmRSS" in present:
            return "VmRSS"
    return ""


def _read_largest_bytes() -> int:
    import resource  # POSIX alone has it

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, everything else kibibytes.
    return largest if sys.platform == "darwin" else largest * 1024
