"""Moves tensors by the exact mean of what was added, chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import Loops, loops_and_threads
from subfleet.elastic.held_regions import HeldRegions
from subfleet.elastic.side_by_side import run_until_one_fails

__all__ = ["Move", "move_tensors"]

_CPU_CHUNK = 2**15
_COMPILED_CHUNK = 2**18
_GPU_CHUNK = 2**26


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """new = old + total / units * scale, computed in float64, where clients suffice and the total is not 0; else old.

    Attributes:
        old: floats, contiguous.
        total: int64, contiguous, of the same shape and on the same device.
        regions: the units and clients of every element.
        min_clients: how many suffice; 1 or more.
        scale: a power of two.
    """

    old: Tensor
    total: Tensor
    regions: HeldRegions
    min_clients: int
    scale: float


def move_tensors(moves: Mapping[str, Move]) -> dict[str, Tensor]:
    """The moved tensors, in memory of their own.

    They are moved side by side on the CPU, with as many threads as `torch.get_num_threads` says.
    """
    loops, thread_count = loops_and_threads([move.old for move in moves.values()])
    new = {name: _memory_like(move.old) for name, move in moves.items()}
    jobs = [job for name, move in moves.items() for job in _jobs(move, new[name], loops)]
    run_until_one_fails(jobs, thread_count)
    return new


def _memory_like(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    # Of NumPy, which asks the system for large pages: the first touch of small ones takes longer than the move.
    memory = np.empty(tensor.numel() * tensor.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(tensor.dtype).reshape(tensor.shape)


def _jobs(move: Move, new: Tensor, loops: Loops | None) -> Iterator[Callable[[], bool]]:
    units, clients = move.regions.shared_units_and_clients() or (0, 0)
    if loops is None or clients < move.min_clients or move.old.dtype != torch.float32:
        yield partial(_move_by_pytorch, move, new)
        return
    # The scale is a power of two, and takes no bit off whatever it divides or multiplies.
    divisor = units / move.scale
    old, total, target = (tensor.reshape(-1).numpy() for tensor in (move.old, move.total, new))
    for start in range(0, new.numel(), _COMPILED_CHUNK):
        stop = min(start + _COMPILED_CHUNK, new.numel())
        yield partial(loops.move, old, total, divisor, target, start, stop)


def _move_by_pytorch(move: Move, new: Tensor) -> bool:
    size = _CPU_CHUNK if new.device.type == "cpu" else _GPU_CHUNK
    tensors = (move.old, new, move.total, *move.regions.units_and_clients())
    for old, target, total, units, clients in zip(
        *(torch.split(tensor.reshape(-1), size) for tensor in tensors), strict=True
    ):
        # A sum of exactly 0 is left out as well: -0.0 + 0.0 would not be -0.0.
        moves = (clients >= move.min_clients) & (total != 0)
        mean = total.to(torch.float64) / units.clamp(min=1).to(torch.float64)
        changed = (old.to(torch.float64) + mean * move.scale).to(old.dtype)
        target.copy_(torch.where(moves, changed, old))
    return True
