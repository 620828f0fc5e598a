"""What the C library's allocator has given out in this process, to count what one call keeps."""

import ctypes

__all__ = ["heap_bytes"]


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    )


def heap_bytes() -> int | None:
    """Bytes in use, in all threads' heaps and in blocks of their own; None where the C library does not count them.

    Unlike the resident size it neither misses what comes from memory that was free already, nor rounds to pages.
    """
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return None
    count.restype = _Mallinfo2
    info = count()
    return int(info.uordblks + info.hblkhd)
