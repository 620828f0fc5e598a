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

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from subfleet.protocol.errors import MemoryLimitError

_PROC = Path("/proc/self")
_RESET_HIGH_WATER = "5"
_KIBIBYTE = 1024


def release_free_memory() -> None:
    """Return freed heap memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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

    def __init__(self, limit_bytes: int, proc: Path = _PROC, *, held_bytes: int = 0) -> None:
        release_free_memory()
        self._limit_bytes = limit_bytes
        self._proc = proc
        self._peak_bytes = _make_peak_reader(proc)
        self._growth_bytes = 0
        self._base_bytes = self._peak_bytes() - held_bytes
        self._base_file_bytes = self._read_bytes("RssFile") or 0
        self._base_own_bytes = (self._measure_own_bytes() or 0) - held_bytes

    def measure_held_bytes(self) -> int:
        """Measure the current growth without pages of files; the largest growth if it cannot be read."""
        own_bytes = self._measure_own_bytes()
        return self.growth_bytes() if own_bytes is None else max(own_bytes - self._base_own_bytes, 0)

    def growth_bytes(self) -> int:
        """Measure the largest growth so far, without pages of files that were mapped since."""
        mapped_bytes = max((self._read_bytes("RssFile") or 0) - self._base_file_bytes, 0)
        self._growth_bytes = max(self._growth_bytes, self._peak_bytes() - self._base_bytes - mapped_bytes)
        return self._growth_bytes

    def _measure_own_bytes(self) -> int | None:
        """Memory without pages of files (with them on kernels before 4.5); None if it cannot be read."""
        own_bytes = self._read_bytes("RssAnon")
        return self._read_bytes("VmRSS") if own_bytes is None else own_bytes

    def _read_bytes(self, field: str) -> int | None:
        with suppress(OSError, KeyError):
            return _read_status_bytes(self._proc / "status", field)
        return None

    def check(self) -> None:
        """Compare the growth with the limit.

        Raises:
            MemoryLimitError: the process grew beyond it.
        """
        if self.growth_bytes() > self._limit_bytes:
            raise MemoryLimitError(needed_bytes=self._growth_bytes, limit_bytes=self._limit_bytes)


def _make_peak_reader(proc: Path) -> Callable[[], int]:
    status = proc / "status"
    try:
        _read_status_bytes(status, "VmRSS")
    except (OSError, KeyError):
        return _read_largest_bytes
    try:
        (proc / "clear_refs").write_text(_RESET_HIGH_WATER)
        _read_status_bytes(status, "VmHWM")
    except (OSError, KeyError):
        return lambda: _read_status_bytes(status, "VmRSS")
    return lambda: _read_status_bytes(status, "VmHWM")


def _read_status_bytes(status: Path, field: str) -> int:
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * _KIBIBYTE
    raise KeyError(field)


def _read_largest_bytes() -> int:
    import resource  # POSIX alone has it

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, everything else kibibytes.
    return largest if sys.platform == "darwin" else largest * _KIBIBYTE
