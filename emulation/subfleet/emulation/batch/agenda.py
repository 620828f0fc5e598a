"""What happens at which logical time."""

import heapq
import math
from collections.abc import Callable


class LogicalClock:
    """A clock that only `advance` moves.

    Args:
        now_s: seconds since the start.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def advance(self, to_s: float) -> None:
        """Move the clock forward to a time."""
        self._now_s = max(self._now_s, to_s)


class Agenda:
    """Functions to be called at logical times, in order; of equal times, the one that was added first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []
        self._functions: dict[int, Callable[[], None]] = {}
        self._added = 0

    @property
    def next_s(self) -> float:
        """The time of the next function; infinite if there is none."""
        while self._entries and self._entries[0][1] not in self._functions:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else math.inf

    def add(self, at_s: float, function: Callable[[], None]) -> int:
        """Add a function; returns its number."""
        self._added += 1
        self._functions[self._added] = function
        heapq.heappush(self._entries, (at_s, self._added))
        return self._added

    def cancel(self, number: int) -> None:
        """Remove a function, unless it has been called."""
        self._functions.pop(number, None)

    def run(self, now_s: float) -> None:
        """Call everything that is due."""
        while self.next_s <= now_s:
            self._functions.pop(heapq.heappop(self._entries)[1])()
