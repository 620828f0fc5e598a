"""Interleaved timing: every runner in turn, repeatedly, so that the machine's load affects all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

BLOCK_S = 0.03
PAUSE_S = 0.005
"""Pause after which spinning threads of the last runner are asleep."""


def measure_medians_s(runners: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median seconds of one call of each runner.

    Each round calls every runner for about `BLOCK_S`, at least once, and begins with another one.

    Args:
        runners: the runners by name; each is called at least once before timing.
        rounds: 1 or more.
    """
    calls = {name: max(1, round(BLOCK_S / max(_measure_seconds(run, 2), 1e-6))) for name, run in runners.items()}
    times_s: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for number in range(rounds):
        for name in _rotate(names, number):
            time.sleep(PAUSE_S)
            times_s[name] += [_measure_seconds(runners[name], 1) for _ in range(calls[name])]
    return {name: statistics.median(samples_s) for name, samples_s in times_s.items()}


def _measure_seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds of the last of several calls."""
    for _ in range(calls - 1):
        run()
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _rotate(names: Sequence[str], number: int) -> list[str]:
    start = number % len(names)
    return [*names[start:], *names[:start]]
