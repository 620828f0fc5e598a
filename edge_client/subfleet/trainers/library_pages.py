"""A runtime's code, mapped before anything is measured.

A library's pages enter a process's resident size when they are first touched, in pieces whose size the kernel picks by
the state of its page cache. So the first steps of a program grow a process by 1 to 5 MB of the runtime's own code: how
much says nothing of the program, and differs from run to run. Mapped at once, the code counts as what it is: there
whatever program runs. Such pages are shared and read only; the kernel drops them again where memory is short.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; older kernels refuse it, which costs only exactness
_READ_ONLY = ("r--p", "r-xp")


def map_library(folder: Path, maps: Path = Path("/proc/self/maps"), *, without: str = "") -> int:
    """Map the read-only pages of every library that is loaded from a folder.

    Args:
        folder: of the installed runtime.
        maps: the process's table of mappings; where there is none, nothing is done.
        without: part of the name of libraries that are left out, since programs need little of them; "" for none.

    Returns:
        Bytes that are mapped; 0 where the system cannot do it.
    """
    mapped_bytes = 0
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in maps.read_text().splitlines():
            span, permissions, *_, path = line.split(maxsplit=5)
            if permissions not in _READ_ONLY or not path.startswith(f"{folder}/") or (without and without in path):
                continue
            start, _, end = span.partition("-")
            size_bytes = int(end, 16) - int(start, 16)
            if madvise(int(start, 16), size_bytes, _POPULATE_READ) == 0:
                mapped_bytes += size_bytes
    return mapped_bytes
