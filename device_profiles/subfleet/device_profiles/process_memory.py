"""The memory of this process, where the C library and the kernel tell it (Linux)."""

import ctypes
from pathlib import Path

PROC = Path("/proc/self")
"""The process's folder of the proc file system."""
_RESET_HIGH_WATER = "5"
_KIBIBYTE = 1024
_SIZES = frozenset({"VmHWM", "VmRSS", "RssAnon", "RssFile"})


def release_free_memory() -> None:
    """Return freed heap memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_high_water(proc: Path = PROC) -> bool:
    """Reset the process's high-water mark (VmHWM) to its present size; returns False if the kernel refuses."""
    try:
        (proc / "clear_refs").write_text(_RESET_HIGH_WATER)
    except OSError:
        return False
    return True


def read_process_sizes(proc: Path = PROC) -> dict[str, int]:
    """Read the process's sizes in bytes that are listed, at once: VmHWM, VmRSS, RssAnon and RssFile.

    Raises:
        OSError: there is no such file.
    """
    pairs = (line.partition(":") for line in (proc / "status").read_text().splitlines())
    return {name: int(value.split()[0]) * _KIBIBYTE for name, _, value in pairs if name in _SIZES}
