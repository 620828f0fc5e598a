"""Counts the memory that the C library's allocator has allocated in this process, and measures what comes and goes."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from subfleet.device_profiles.process_memory import PROC, read_process_sizes, release_free_memory, reset_high_water


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


def measure_passing_bytes(run: Callable[[], object], proc: Path = PROC) -> int:
    """Run something, and measure the most memory that it took beyond what the process holds afterwards.

    Memory that is free already would hide what is taken, so it is returned to the system, before and after.

    Args:
        run: what to run.
        proc: the process's folder of the proc file system.

    Returns:
        The bytes; 0 where the kernel does not keep a high-water mark that can be reset.
    """
    release_free_memory()
    marked = reset_high_water(proc)
    run()
    with suppress(OSError, KeyError):
        highest_bytes = read_process_sizes(proc)["VmHWM"]
        release_free_memory()
        return max(highest_bytes - read_process_sizes(proc)["VmRSS"], 0) if marked else 0
    return 0
