"""The session that a trainer keeps from one job to the next, and the memory that it holds meanwhile.

The next job's memory counts from the state without it: what it holds is part of the growth that is measured, and the
agent counts it as free when it measures its budget, since whatever comes next either uses it or drops it first. A
session that holds more than a share of its job's limit is not kept: other programs on the device may want the memory
between rounds, and to load a program again takes a fraction of one step's time for each of thousands of steps.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from subfleet.protocol.errors import ProtocolError
from subfleet.trainers.evaluation_layout import EvaluationLayout
from subfleet.trainers.layouts import AnyLayout
from subfleet.trainers.memory import MemoryWatch, Watch, release_free_memory
from subfleet.trainers.sessions import StepSession
from subfleet.trainers.step_layout import StepLayout

__all__ = ["Host", "KeptSession", "Loaded", "LoadedSession", "Slot", "held"]

_Kind = TypeVar("_Kind", bound="Loaded")
_LARGEST_SHARE = 0.25
"""Of a job's memory limit. Measured with ONNX Runtime, whose arena is given back: 5 MB of 51 MB and of 293 MB peaks."""


class Loaded(Protocol):
    """What is loaded of a program, to be kept."""

    @property
    def sha256(self) -> str:
        """Of the packed program."""
        ...

    @property
    def threads(self) -> int:
        """That it runs on."""
        ...

    @property
    def planned_bytes(self) -> int:
        """What the runtime is planned to hold for it, where that differs from job to job; else 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSession:
    """A session and its program's layout.

    Attributes:
        sha256: of the packed program.
        threads: that it runs on.
        layout: of the program.
        session: ready to begin.
        least_bytes: what the program takes as inputs alone, by its manifest.
    """

    sha256: str
    threads: int
    layout: AnyLayout
    session: StepSession
    least_bytes: int

    @property
    def planned_bytes(self) -> int:
        """See `Loaded.planned_bytes`."""
        return 0

    @property
    def for_training(self) -> StepLayout:
        """The layout of a training program; raises ProtocolError where it is another one."""
        if not isinstance(self.layout, StepLayout):
            raise ProtocolError("the program is no training program, but must be one; name another")
        return self.layout

    @property
    def for_evaluation(self) -> EvaluationLayout:
        """The layout of an evaluation program; raises ProtocolError where it is another one."""
        if not isinstance(self.layout, EvaluationLayout):
            raise ProtocolError("the program is no evaluation program, but must be one; name another")
        return self.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSession:
    """What is loaded, between two jobs, and the bytes of memory that it holds."""

    loaded: Loaded
    held_bytes: int


class Host(Protocol):
    """The process that trainings run in: what it keeps from one to the next, and how its memory is measured."""

    @property
    def held_bytes(self) -> int:
        """Memory that is kept between two trainings."""
        ...

    @property
    def shared(self) -> bool:
        """Whether several devices train in it: what one of them has no use for, another has."""
        ...

    def take(self, sha256: str, threads: int) -> KeptSession | None:
        """The kept session of this program and these threads, if there is one; it is no longer kept."""
        ...

    def keep(self, loaded: Loaded, *, held_bytes: int, limit_bytes: int) -> None:
        """Keep a session for a later job, where there is room for it."""
        ...

    def watch(self, limit_bytes: int, *, held_bytes: int) -> Watch:
        """Begin to measure a training's memory against its limit."""
        ...

    def release(self) -> None:
        """Give freed memory back to the system, where that matters."""
        ...

    def now_s(self) -> float:
        """Seconds of a clock that measures how long steps take."""
        ...


class Slot:
    """A device's own process: room for one session, and the memory that really grows; see `Host`."""

    def __init__(self) -> None:
        self._kept: KeptSession | None = None

    @property
    def held_bytes(self) -> int:
        """Memory that the kept session holds; 0 where there is none."""
        kept = self._kept
        return 0 if kept is None else kept.held_bytes

    @property
    def shared(self) -> bool:
        """See `Host.shared`."""
        return False

    def take(self, sha256: str, threads: int) -> KeptSession | None:
        """The kept session, if it is of this program and these threads; whichever it is, it is no longer kept."""
        kept, self._kept = self._kept, None
        if kept is None or (kept.loaded.sha256, kept.loaded.threads) != (sha256, threads):
            return None
        return kept

    def keep(self, loaded: Loaded, *, held_bytes: int, limit_bytes: int) -> None:
        """Keep a session for the next job, unless it holds too much of the last one's memory limit."""
        if held_bytes <= _LARGEST_SHARE * limit_bytes:
            self._kept = KeptSession(loaded=loaded, held_bytes=held_bytes)

    def watch(self, limit_bytes: int, *, held_bytes: int) -> Watch:
        """See `Host.watch`."""
        return MemoryWatch(limit_bytes, held_bytes=held_bytes)

    def release(self) -> None:
        """See `Host.release`."""
        release_free_memory()

    def now_s(self) -> float:
        """See `Host.now_s`."""
        return time.perf_counter()


@contextmanager
def held(
    slot: Host, sha256: str, *, threads: int, limit_bytes: int, kind: type[_Kind], load: Callable[[], _Kind]
) -> Iterator[tuple[_Kind, Watch]]:
    """What a job works with, loaded or kept from the job before, and the watch over the memory of what is done with it.

    Args:
        slot: the process.
        sha256: of the packed program.
        threads: that it runs on.
        limit_bytes: of the job's memory.
        kind: what the job works with.
        load: loads it.

    Raises:
        MemoryLimitError: the process grew beyond the limit.
        ProtocolError: what is kept of the program is for other jobs.
    """
    kept = slot.take(sha256, threads)
    before_bytes = 0 if kept is None else kept.loaded.planned_bytes
    watch = slot.watch(limit_bytes, held_bytes=0 if kept is None else kept.held_bytes)
    try:
        loaded = load() if kept is None else kept.loaded
        if not isinstance(loaded, kind):
            raise ProtocolError("the job's settings are for another kind of program; name another")
        watch.check()
        yield loaded, watch
        watch.check()
        slot.release()
        # What a session holds is counted once, in the job that loaded it. Counted anew in each, all that a job adds to
        # the process and gives back after it (its thread's stack) would be added to it again and again.
        grown_bytes = loaded.planned_bytes - before_bytes
        held_bytes = watch.held_bytes() if kept is None else max(kept.held_bytes + grown_bytes, 0)
        slot.keep(loaded, held_bytes=held_bytes, limit_bytes=limit_bytes)
    finally:
        slot.release()
