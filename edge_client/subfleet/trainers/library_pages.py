"""Maps a runtime's code into memory before anything is measured.

A library's pages count in a process's resident size when they are first touched, in pieces of a size that depends on
the kernel's page cache. So the first steps of any program grow a process by 1 to 5 MB of the runtime's own code, which
differs from run to run. If all code is mapped first, it is not part of a program's growth. Such pages are shared and
read-only; the kernel drops them if memory is short.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; older kernels refuse it, and measuring is less exact
_READ_ONLY = ("r--p", "r-xp")


def map_library(folder: Path, maps: Path = Path("/proc/self/maps"), *, without: str = "") -> int:
    """Map the read-only pages of every library that is loaded from a folder.

    Args:
        folder: the folder of the installed runtime.
        maps: the process's table of mappings; without one nothing is done.
        without: part of the name of libraries to leave out, since programs need little of them; "" for none.

    Returns:
        The number of mapped bytes; 0 if the system cannot do it.
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
