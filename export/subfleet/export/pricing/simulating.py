"""What a runtime's memory comes to, from what a program asks of it in order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.memory.onnx_arena import Arena
from subfleet.export.memory.values import counted_bytes
from subfleet.export.pricing.library import Request
from subfleet.export.pricing.packing import Blocks, executorch_buffer_bytes, xnnpack_workspace_bytes

__all__ = ["SIMULATIONS", "Simulation"]

_BLOCK_BYTES = 64
"""XNNPACK's blocks are whole multiples of it."""
_KEPT_BYTES = 2**14
"""What a first step keeps of the heap beside the workspace. Measured: 1 to 15 kB, with the number of nodes."""
_SCALARS_BYTES = 2**10
"""Of the program's buffer for tensors without dimensions, which are held under two shapes. Measured: 100 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How a runtime's memory is told from the requests.

    Attributes:
        peak_bytes: of activations and workspace, where all goes well.
        least_factor: of the plan over that, as far as is known beforehand.
        counts_nodes: whether nodes weigh 1 each, or the bytes of their objects.
    """

    peak_bytes: Callable[[Sequence[Request]], int]
    least_factor: float = 1.0
    counts_nodes: bool = True


def _live(requests: Sequence[Request]) -> int:
    """The most bytes that are taken at once."""
    sizes: dict[int, int] = {}
    alive = peak = 0
    for block, size in requests:
        if size == GIVEN_BACK:
            alive -= sizes[block]
            continue
        sizes[block] = size
        alive += size
        peak = max(peak, alive)
    return peak


def _arena(requests: Sequence[Request]) -> int:
    """ONNX Runtime's arena after a step."""
    arena = Arena()
    addresses: dict[int, int] = {}
    for block, size in requests:
        if size == GIVEN_BACK:
            arena.give(addresses.pop(block))
        else:
            addresses[block] = arena.take(size)
    return arena.resident_bytes


def _executorch(requests: Sequence[Request]) -> int:
    """XNNPACK's workspace, as plans count it, and the program's own buffer, for what outlives a part of it.

    A block of size 0 is where a part begins.
    """
    lives = _lives(requests)
    begins = lives[lives[:, 0] == 0, 1]
    parts = np.searchsorted(begins, lives[:, 1:], side="right")
    lasting = parts[:, 0] < parts[:, 1]
    inside = lives[~lasting & (lives[:, 0] > 0)]
    inside[:, 0] = -(-inside[:, 0] // _BLOCK_BYTES) * _BLOCK_BYTES
    workspace = xnnpack_workspace_bytes(inside)
    buffer = executorch_buffer_bytes(np.column_stack([lives[lasting, 0], parts[lasting]]))
    return counted_bytes(workspace + _KEPT_BYTES) + buffer + _SCALARS_BYTES


def _lives(requests: Sequence[Request]) -> Blocks:
    found: dict[int, tuple[int, int, int]] = {}
    for at, (block, size) in enumerate(requests):
        found[block] = (found[block][0], found[block][1], at) if size == GIVEN_BACK else (size, at, len(requests))
    return np.array([*found.values()], dtype=np.int64).reshape(-1, 3)


SIMULATIONS: Mapping[str, Simulation] = MappingProxyType(
    {
        "onnx": Simulation(peak_bytes=_arena),
        "executorch": Simulation(peak_bytes=_executorch, counts_nodes=False),
        # Eager PyTorch's plan is a bound: its share of activations once more, and this.
        "torch": Simulation(peak_bytes=_live, least_factor=1.75),
    }
)
"""By target."""
