"""Counts the memory that the C library's allocator has allocated in this process, and measures what comes and goes."""

import ctypes
from collections.abc import Callable
from pathlib import Path

_PROC = Path("/proc/self")


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    )


def heap_bytes() -> int | None:
    """Return the bytes in use, in all heaps and in separate blocks; None if the C library does not count them.

    Unlike the resident size, it includes memory that was free before, and is not rounded to pages.
    """
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return None
    count.restype = _Mallinfo2
    info = count()
    return int(info.uordblks + info.hblkhd)


def measure_passing_bytes(run: Callable[[], object], proc: Path = _PROC) -> int:
    """Run something, and measure the most memory that it took beyond what the process holds afterwards.

    Memory that is free already would hide what is taken, so it is returned to the system, before and after.

    Args:
        run: what to run.
        proc: the process's folder of the proc file system.

    Returns:
        The bytes; 0 where the kernel does not keep a high-water mark that can be reset.
    """
    _release_free_memory()
    marked = _reset_high_water(proc)
    run()
    highest_bytes = _read_status(proc, "VmHWM")
    _release_free_memory()
    return max(highest_bytes - _read_status(proc, "VmRSS"), 0) if marked else 0


def _release_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_high_water(proc: Path) -> bool:
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read_status(proc: Path, field: str) -> int:
    """A size of the process in bytes; 0 if it is not listed."""
    try:
        lines = (proc / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
