"""What the limits that this process was started under, such as `ulimit -v`, still let it take."""

import sys
from types import ModuleType

__all__ = ["process_room_bytes"]


def process_room_bytes(psutil: ModuleType) -> int | None:
    """The least of what the limits on address space and on data leave free; None where there is none.

    Args:
        psutil: the package, as `load_psutil` gives it.
    """
    if sys.platform == "win32":  # it has no such limits
        return None
    import resource

    used = psutil.Process().memory_info()
    limits = (
        (resource.getrlimit(resource.RLIMIT_AS)[0], used.vms),  # ulimit -v
        (resource.getrlimit(resource.RLIMIT_DATA)[0], getattr(used, "data", 0)),  # ulimit -d; Linux alone tells its use
    )
    rooms = [max(limit - taken, 0) for limit, taken in limits if limit != resource.RLIM_INFINITY]
    return min(rooms, default=None)
