"""Sums of rounded tensors as integers by PyTorch, and the mean that moves a model, chunk by chunk.

`add_exactly` adds rounded multiples of tensors to int64 sums, or nothing at all: integer sums can be undone exactly, so
changes are checked in the same pass, and if one is refused, all that was added before it is subtracted. It serves every
device, map and type; whole updates on the CPU are added by compiled loops where Numba is installed
(`subfleet.elastic.compiled_sums`), with the same bits.

`move_tensors` moves a model by the exact mean of a sum; on the CPU by a compiled loop where there is one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import Loops, loops_for, threads_for
from subfleet.elastic.maps import Gather, TensorMap
from subfleet.protocol.errors import ProtocolError

CPU_CHUNK = 2**15
COMPILED_MOVE_CHUNK = 2**18
GPU_CHUNK = 2**26


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """One addition of round(values * factor) to the elements that a map reads.

    Attributes:
        name: name of the tensor, for messages.
        total: int64 sum of the whole tensor.
        values: floats on the device of the total, in the shape of the local tensor.
        factor: a number, or a float64 tensor that broadcasts against the values; at most 29 significant bits each.
        limit: largest absolute value.
        map: from the tensor to the local one.
    """

    name: str
    total: Tensor
    values: Tensor
    factor: float | Tensor
    limit: float
    map: TensorMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Some rows of a term: values and factor for a part of its total; or all of it, placed by a map."""

    total: Tensor
    values: Tensor
    factor: float | Tensor
    map: TensorMap | None

    def add(self, sign: int) -> None:
        """Add it, or subtract it with sign -1."""
        units = torch.mul(self.values.to(torch.float64), self.factor).round_().to(torch.int64)
        if sign < 0:
            units.neg_()
        if self.map is None:
            self.total.add_(units)
        else:
            self.map.scatter(units, self.total)


def add_exactly(tensors: Sequence[Sequence[Term]]) -> None:
    """Add all terms, or none if one is refused.

    Args:
        tensors: the terms of each summed tensor, which share its total. On the CPU, `torch.get_num_threads()` threads
            work on different tensors if these are large.

    Raises:
        ProtocolError: a value is not finite or exceeds its limit.
    """
    added: list[_Piece] = []
    refused: list[Term] = []
    jobs = [partial(_add_in_turn, terms, added, refused) for terms in tensors]
    on_cpu = (term.values.numel() for terms in tensors for term in terms if term.values.is_cpu)
    try:
        run_until_one_fails(jobs, threads_for(sum(on_cpu)))
        if refused:
            check_limit(refused[0].name, refused[0].values, refused[0].limit)
    except BaseException:
        for piece in added:
            piece.add(-1)
        raise


def _add_in_turn(terms: Sequence[Term], added: list[_Piece], refused: list[Term]) -> bool:
    """Add in order, recording each piece; stop and return False when a term is refused."""
    for term in terms:
        for piece in _cut(term):
            if not _is_allowed(piece.values, term.limit):
                refused.append(term)
                return False
            piece.add(1)
            added.append(piece)
    return True


def _cut(term: Term) -> Iterator[_Piece]:
    """Pieces whose intermediate numbers fit a cache."""
    total, values, factor = term.total, term.values, term.factor
    if not total.dim() or not isinstance(term.map, Gather) or not (term.map.is_whole or term.map.is_view):
        yield _Piece(total=total, values=values, factor=factor, map=term.map)
        return
    total = total if term.map.is_whole else term.map.extract(total)
    step = max(1, (CPU_CHUNK if total.device.type == "cpu" else GPU_CHUNK) * total.shape[0] // total.numel())
    factors = factor.expand(values.shape) if isinstance(factor, Tensor) else None
    for start in range(0, total.shape[0], step):
        own = slice(start, start + step)
        yield _Piece(total=total[own], values=values[own], factor=factor if factors is None else factors[own], map=None)


def check_limit(name: str, values: Tensor, limit: float) -> None:
    """Check the values of an update's tensor.

    Raises:
        ProtocolError: one is not finite or exceeds the limit.
    """
    if not _is_allowed(values, limit):
        largest = values.abs().max().item()
        raise ProtocolError(
            f"tensor {name!r} of an update holds a change of {largest}, but must be finite and at most {limit}"
        )


def _is_allowed(values: Tensor, limit: float) -> bool:
    # max() propagates NaN, and NaN <= limit is False.
    return values.abs().max().item() <= limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """new = old + total / units * scale in float64 where enough clients contributed and the total is not 0; else old.

    Attributes:
        old: contiguous floats.
        total: contiguous int64 with the same shape and device.
        counts: (2, ...): units and clients, int64; the dimensions broadcast against the tensor, and only the last ones
            may be 1 where the tensor's are not.
        min_clients: clients that an element needs, at least 1.
        scale: a power of two.
    """

    old: Tensor
    total: Tensor
    counts: Tensor
    min_clients: int
    scale: float


def move_tensors(moves: Mapping[str, Move]) -> dict[str, Tensor]:
    """Compute the moved tensors in new memory, on the CPU with `torch.get_num_threads()` threads."""
    on_cpu = sum(move.old.numel() for move in moves.values() if move.old.is_cpu)
    loops = loops_for(on_cpu)
    new = {name: _memory_like(move.old) for name, move in moves.items()}
    jobs = [job for name, move in moves.items() for job in _jobs(move, new[name], loops)]
    run_until_one_fails(jobs, threads_for(on_cpu))
    return new


def _memory_like(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    # NumPy asks for large pages; touching small pages for the first time takes longer than the move itself.
    memory = np.empty(tensor.numel() * tensor.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(tensor.dtype).reshape(tensor.shape)


def _jobs(move: Move, new: Tensor, loops: Loops | None) -> Iterator[Callable[[], bool]]:
    if loops is None or move.old.dtype != torch.float32 or not move.old.is_cpu:
        yield partial(_move_by_pytorch, move, new)
        return
    old, total, target = (tensor.reshape(-1).numpy() for tensor in (move.old, move.total, new))
    counts = tuple(cells.reshape(-1).numpy() for cells in move.counts)
    for start in range(0, new.numel(), COMPILED_MOVE_CHUNK):
        span = start, min(start + COMPILED_MOVE_CHUNK, new.numel())
        yield partial(loops.move, old, total, counts, (move.min_clients, move.scale), target, span)


def _move_by_pytorch(move: Move, new: Tensor) -> bool:
    size = CPU_CHUNK if new.device.type == "cpu" else GPU_CHUNK
    counts = (own.to(new.device).expand(new.shape) for own in move.counts)
    tensors = (move.old, new, move.total, *counts)
    for old, target, total, units, clients in zip(
        *(torch.split(tensor.reshape(-1), size) for tensor in tensors), strict=True
    ):
        # A total of exactly 0 moves nothing: -0.0 + 0.0 would not be -0.0.
        moves = (clients >= move.min_clients) & (total != 0)
        mean = total.to(torch.float64) / units.clamp(min=1).to(torch.float64)
        changed = (old.to(torch.float64) + mean * move.scale).to(old.dtype)
        target.copy_(torch.where(moves, changed, old))
    return True


def run_until_one_fails(jobs: Iterable[Callable[[], bool]], thread_count: int) -> None:
    """Run jobs on threads; after a job returns False, no further job starts and running jobs finish.

    With one thread, jobs run in the calling thread. Suits work that releases the interpreter's lock.
    """
    left = deque(jobs)
    if thread_count == 1:
        _work(left)
        return
    with ThreadPoolExecutor(thread_count) as pool:
        for worker in [pool.submit(_work, left) for _ in range(thread_count)]:
            worker.result()


def _work(left: deque[Callable[[], bool]]) -> None:
    while left:
        try:
            job = left.popleft()
        except IndexError:
            # Another thread took the last job.
            return
        if not job():
            left.clear()
