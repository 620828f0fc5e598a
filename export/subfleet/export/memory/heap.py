"""Counts the memory that the C library's allocator has allocated in this process."""

import ctypes


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
