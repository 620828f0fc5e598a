"""Where planners lay blocks that they know beforehand, each with its size and the time for which it is needed.

All take the largest block first; ties keep their order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "executorch_buffer_bytes", "xnnpack_workspace_bytes"]

Blocks = npt.NDArray[np.int64]
"""Size, first and last moment of each block: (blocks, 3)."""
_ENDLESS = 2**62
_ALIGNMENT = 16


def xnnpack_workspace_bytes(blocks: Blocks) -> int:
    """Each block goes into the smallest gap between those needed beside it, else behind them (`memory-planner.c`)."""
    sizes, first, last = blocks[np.argsort(-blocks[:, 0], kind="stable")].T
    starts = np.zeros_like(sizes)
    for at, size in enumerate(sizes.tolist()):
        beside = np.flatnonzero((first[:at] <= last[at]) & (last[:at] >= first[at]))
        beside = beside[np.argsort(starts[beside], kind="stable")]
        before = np.maximum.accumulate(np.append(0, starts[beside] + sizes[beside]))
        gaps = np.append(starts[beside], _ENDLESS) - before
        fitting = np.flatnonzero(gaps >= size)
        starts[at] = before[fitting[gaps[fitting].argmin()]]
    return int((starts + sizes).max(initial=0))


def executorch_buffer_bytes(blocks: Blocks) -> int:
    """Each block goes behind those needed beside it, into the first larger block's place that has room for it.

    That is `greedy` of `executorch.exir.memory_planning`.
    """
    places: list[tuple[int, list[tuple[int, Any]]]] = []
    sizes = -(-blocks[:, 0] // _ALIGNMENT) * _ALIGNMENT
    for at in np.argsort(-sizes, kind="stable").tolist():
        size, (_, first, last) = int(sizes[at]), blocks[at].tolist()
        for place_size, members in places:
            start = max((end for end, (a, b) in members if a <= last and b >= first), default=0)
            if start + size <= place_size:
                members.append((start + size, (first, last)))
                break
        else:
            places.append((size, [(size, (first, last))]))
    return sum(size for size, _ in places)
