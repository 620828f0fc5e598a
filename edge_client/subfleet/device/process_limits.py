"""Resource limits of processes: how much memory they leave, and a limit on further growth."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_STATM = Path("/proc/self/statm")
_DATA_PAGES = 5
"""Place in `statm` of the pages of data and stacks, of which `RLIMIT_DATA` counts nearly all."""
_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO = "500"
_ARENA_MAX = -8
"""M_ARENA_MAX, an option of mallopt."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, an option of prctl."""


def process_room_bytes(psutil: ModuleType, process_id: int | None = None) -> int | None:
    """Compute the memory that the limits on address space and data leave free; None without limits.

    Args:
        psutil: the package, as `load_psutil` gives it.
        process_id: of a child that was started under the same limits; None is this process.
    """
    if sys.platform == "win32":  # it has no such limits
        return None
    import resource

    used = psutil.Process(process_id).memory_info()
    limits = (
        (resource.getrlimit(resource.RLIMIT_AS)[0], used.vms),  # ulimit -v
        (resource.getrlimit(resource.RLIMIT_DATA)[0], getattr(used, "data", 0)),  # ulimit -d; Linux alone tells its use
    )
    rooms = [max(limit - taken, 0) for limit, taken in limits if limit != resource.RLIM_INFINITY]
    return min(rooms, default=None)


@contextmanager
def limit_growth(growth_bytes: int) -> Iterator[None]:
    """A context in which the system limits this process's memory to its current size plus a growth.

    The limit is `RLIMIT_DATA`, as a runtime maps gigabytes of address space that it never touches. It holds on Linux;
    elsewhere nothing is limited.

    Args:
        growth_bytes: of memory that belongs to this process alone, 0 or more.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = _data_bytes() + growth_bytes
    for known in (before, most):
        if known != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, known)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def offer_to_the_kernel() -> None:
    """If memory runs out, let the kernel kill this process before others of the same user. Linux only."""
    try:
        _SCORE.write_text(_FIRST_TO_GO, encoding="utf-8")
    except OSError:
        return


def use_one_heap() -> None:
    """Have all threads of this process allocate from one heap; call it before there are any. glibc only.

    By default, glibc gives threads several heaps, up to eight for each processor. What one thread has freed is then not
    used by another, so that a round of training may take more memory than its plan, by 6 % and more.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library, such as musl, has one heap
        mallopt(_ARENA_MAX, 1)


def end_with_parent(parent_id: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent_id: of the process that started this one; where that has ended already, this one ends here.

    Raises:
        SystemExit: it has.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import os
    import signal

    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_id:
        raise SystemExit(1)


def _data_bytes() -> int:
    import resource

    return int(_STATM.read_text(encoding="utf-8").split()[_DATA_PAGES]) * resource.getpagesize()
