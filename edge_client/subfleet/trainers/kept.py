"""The package that a trainer keeps loaded between jobs, and its memory.

The next job's memory is measured from the state without it, so it counts as growth. The agent counts it as free when it
measures its budget, since the next job either uses it or drops it first. A package that holds more than a fraction of
its job's limit is not kept: other programs on the device may need the memory between rounds, and loading a program
takes little time compared with the steps of a job.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from subfleet.device_profiles.process_memory import release_free_memory
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import GrowthWatch, MemoryWatch
from subfleet.trainers.program_layout import ProgramLayout

_LARGEST_FRACTION = 0.25
"""Of a job's memory limit. Measured with ONNX Runtime, which releases its arena: 5 MB of 51 MB and of 293 MB peaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A package that is kept between two jobs, and its memory."""

    loaded: Loaded
    held_bytes: int


class Host(Protocol):
    """The process that jobs run in: the package that it keeps, and how its memory is measured."""

    @property
    def held_bytes(self) -> int:
        """Memory that is kept between two trainings."""
        ...

    @property
    def shared(self) -> bool:
        """Whether several devices train in it, and so share its memory."""
        ...

    def find_layout(self, sha256: str, threads: int) -> ProgramLayout | None:
        """Find the layout of the kept package of this digest and number of threads, if there is one."""
        ...

    def take(self, sha256: str, threads: int) -> Kept | None:
        """Take the kept package of this digest and number of threads, if there is one."""
        ...

    def keep(self, loaded: Loaded, *, held_bytes: int, limit_bytes: int) -> None:
        """Keep a package for a later job, if there is room for it."""
        ...

    def watch(self, limit_bytes: int, *, held_bytes: int) -> GrowthWatch:
        """Start to measure a job's memory against its limit."""
        ...

    def release(self) -> None:
        """Return freed memory to the system."""
        ...

    def now_s(self) -> float:
        """Read the clock that measures the time of steps, in seconds."""
        ...

    def read(self, source: str, form: DataForm) -> Dataset:
        """Read a data set in the form that a program takes; see `read_dataset` for its errors."""
        ...


class Slot:
    """A device's own process, which keeps one package; see `Host`."""

    def __init__(self) -> None:
        self._kept: Kept | None = None

    @property
    def held_bytes(self) -> int:
        """Memory that the kept package holds; 0 if there is none."""
        package = self._kept
        return 0 if package is None else package.held_bytes

    @property
    def shared(self) -> bool:
        """See `Host.shared`."""
        return False

    def find_layout(self, sha256: str, threads: int) -> ProgramLayout | None:
        """See `Host.find_layout`."""
        loaded = None if self._kept is None else self._kept.loaded
        return loaded.layout if loaded is not None and (loaded.sha256, loaded.threads) == (sha256, threads) else None

    def take(self, sha256: str, threads: int) -> Kept | None:
        """Take the kept package if it has this digest and number of threads; otherwise it is dropped."""
        package, self._kept = self._kept, None
        if package is None or (package.loaded.sha256, package.loaded.threads) != (sha256, threads):
            return None
        return package

    def keep(self, loaded: Loaded, *, held_bytes: int, limit_bytes: int) -> None:
        """Keep a package for the next job, unless it holds too much of the last one's memory limit."""
        if held_bytes <= _LARGEST_FRACTION * limit_bytes:
            self._kept = Kept(loaded=loaded, held_bytes=held_bytes)

    def watch(self, limit_bytes: int, *, held_bytes: int) -> GrowthWatch:
        """See `Host.watch`."""
        return MemoryWatch(limit_bytes, held_bytes=held_bytes)

    def release(self) -> None:
        """See `Host.release`."""
        release_free_memory()

    def now_s(self) -> float:
        """See `Host.now_s`."""
        return time.perf_counter()

    def read(self, source: str, form: DataForm) -> Dataset:
        """See `Host.read`."""
        return read_dataset(source, form)
