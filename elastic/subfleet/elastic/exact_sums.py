"""Sums of rounded tensors as integers, and the mean that moves a model, chunk by chunk.

`add_exactly` adds rounded multiples of tensors to int64 sums, or nothing at all. Memory bandwidth limits its speed: a
sum takes twice the bytes of a float32 update, read and written. Chunks therefore fit a core's cache, and all updates of
a batch pass over a chunk while it is there. Changes are checked in the same pass, because integer sums can be undone
exactly: if a change is refused, all that was added before it is subtracted again.

`move_tensors` moves a model by the exact mean of a sum. On the CPU both use compiled loops where Numba is installed
(`subfleet.elastic.compiled_loops`); the bits are the same without them and on a GPU.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import ADDED_TOGETHER, Loops, loops_and_threads
from subfleet.elastic.held_regions import HeldRegions
from subfleet.protocol.errors import ProtocolError

CPU_CHUNK = 2**15
COMPILED_ADD_CHUNK = 2**17
COMPILED_MOVE_CHUNK = 2**18
GPU_CHUNK = 2**26
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """One addition, total += round(values * factor); total may be a view.

    Attributes:
        name: name of the tensor, for messages.
        total: int64 sum.
        values: floats with the shape and device of the total.
        factor: a number, or a float64 tensor that broadcasts against the values; at most 29 significant bits each.
        limit: largest absolute value.
        scatter: adds integers with the shape of the values to a total of another shape; None adds element to element.
    """

    name: str
    total: Tensor
    values: Tensor
    factor: float | Tensor
    limit: float
    scatter: Callable[[Tensor, Tensor], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Addition:
    """Terms of one sum, in a range of its elements or rows.

    Attributes:
        terms: the terms.
        start: first element or row.
        stop: end of the range, exclusive.
        add: (sign, stop) adds the terms from `start` on, or subtracts them with sign -1. Returns the position up to
            which all terms were added; beyond it none was. It is below `stop` if a term was refused.
    """

    terms: Sequence[Term]
    start: int
    stop: int
    add: Callable[[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TermGroup:
    """Flat arrays of several terms for one call of the compiled loop."""

    loops: Loops
    total: Any
    values: tuple[Any, ...]
    factors: tuple[float, ...]
    limit: np.float32

    def add(self, start: int, sign: int, stop: int) -> int:
        factors = tuple(sign * factor for factor in self.factors)
        return self.loops.add(self.total, self.values, factors, self.limit, start, stop)


def add_exactly(tensors: Sequence[Sequence[Sequence[Term]]]) -> None:
    """Add all terms, or none if one is refused.

    Args:
        tensors: the batches of each summed tensor. The terms of a batch share a total and pass over its chunks
            together. On the CPU, `torch.get_num_threads()` threads work on different tensors, and on the chunks of a
            tensor with a single batch.

    Raises:
        ProtocolError: a value is not finite or exceeds its limit.
    """
    values = [term.values for batches in tensors for batch in batches for term in batch]
    loops, thread_count = loops_and_threads(values)
    progress: list[tuple[_Addition, int]] = []
    jobs = []
    for batches in tensors:
        chunks = [chunk for batch in batches for chunk in _chunks(batch, loops)]
        # Batches of one tensor overlap, so they must not run at the same time.
        jobs += chunks if len(batches) == 1 else [[addition for chunk in chunks for addition in chunk]]
    run_until_one_fails([partial(_add_in_turn, job, progress) for job in jobs], thread_count)
    refused = [addition for addition, reached in progress if reached < addition.stop]
    if refused:
        for addition, reached in progress:
            if reached > addition.start:
                addition.add(-1, reached)
        raise ProtocolError(_refusal(refused[0].terms))


def _add_in_turn(additions: Sequence[_Addition], progress: list[tuple[_Addition, int]]) -> bool:
    """Add in order, recording how far each addition got; stop and return False when one is refused."""
    for addition in additions:
        reached = addition.add(1, addition.stop)
        progress.append((addition, reached))
        if reached < addition.stop:
            return False
    return True


def _chunks(batch: Sequence[Term], loops: Loops | None) -> list[list[_Addition]]:
    """The additions of each chunk of a sum."""
    if loops is not None and all(_is_plain(term) for term in batch):
        return _compiled_chunks(batch, loops)
    total = batch[0].total
    rows, step = 1, 1
    if batch[0].scatter is None and total.dim():
        size = CPU_CHUNK if total.device.type == "cpu" else GPU_CHUNK
        rows, step = total.shape[0], max(1, size * total.shape[0] // total.numel())
    return [
        [
            _Addition(terms=[term], start=start, stop=min(start + step, rows), add=partial(_add_rows, term, start))
            for term in batch
        ]
        for start in range(0, rows, step)
    ]


def _compiled_chunks(batch: Sequence[Term], loops: Loops) -> list[list[_Addition]]:
    total = batch[0].total.numpy().reshape(-1)
    # float32 like the values, so that the comparison converts nothing; a larger limit is no limit.
    limit = np.float32(min(batch[0].limit, _LARGEST_FLOAT32))
    groups = []
    for first in range(0, len(batch), ADDED_TOGETHER):
        terms = batch[first : first + ADDED_TOGETHER]
        values = [term.values.numpy().reshape(-1) for term in terms]
        factors = [float(term.factor) for term in terms]
        # Unused slots of the loop add 0 times the first array.
        spare = ADDED_TOGETHER - len(terms)
        arrays, numbers = (*values, *values[:1] * spare), (*factors, *[0.0] * spare)
        groups.append((terms, _TermGroup(loops=loops, total=total, values=arrays, factors=numbers, limit=limit)))
    return [
        [
            _Addition(
                terms=terms,
                start=start,
                stop=min(start + COMPILED_ADD_CHUNK, total.size),
                add=partial(group.add, start),
            )
            for terms, group in groups
        ]
        for start in range(0, total.size, COMPILED_ADD_CHUNK)
    ]


def _is_plain(term: Term) -> bool:
    return (
        isinstance(term.factor, float)
        and term.scatter is None
        and term.values.dtype == torch.float32
        and term.values.is_contiguous()
        and term.total.is_contiguous()
    )


def _add_rows(term: Term, start: int, sign: int, stop: int) -> int:
    total, values, factor = term.total, term.values, term.factor
    if term.scatter is None and total.dim():
        total, values = total[start:stop], values[start:stop]
        factor = factor.expand(term.values.shape)[start:stop] if isinstance(factor, Tensor) else factor
    if not _is_allowed(values, term.limit):
        return start
    units = values.to(torch.float64).mul_(factor).round_().to(torch.int64)
    if sign < 0:
        units.neg_()
    if term.scatter is None:
        total.add_(units)
    else:
        term.scatter(units, total)
    return stop


def _is_allowed(values: Tensor, limit: float) -> bool:
    # max() propagates NaN, and NaN <= limit is False.
    return values.abs().max().item() <= limit


def _refusal(terms: Sequence[Term]) -> str:
    term = next(term for term in terms if not _is_allowed(term.values, term.limit))
    largest = term.values.abs().max().item()
    return f"tensor {term.name!r} of an update holds a change of {largest}, but must be finite and at most {term.limit}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """new = old + total / units * scale in float64 where enough clients contributed and the total is not 0; else old.

    Attributes:
        old: contiguous floats.
        total: contiguous int64 with the same shape and device.
        regions: units and client counts of each element.
        min_clients: clients that an element needs, at least 1.
        scale: a power of two.
    """

    old: Tensor
    total: Tensor
    regions: HeldRegions
    min_clients: int
    scale: float


def move_tensors(moves: Mapping[str, Move]) -> dict[str, Tensor]:
    """Compute the moved tensors in new memory, on the CPU with `torch.get_num_threads()` threads."""
    loops, thread_count = loops_and_threads([move.old for move in moves.values()])
    new = {name: _memory_like(move.old) for name, move in moves.items()}
    jobs = [job for name, move in moves.items() for job in _jobs(move, new[name], loops)]
    run_until_one_fails(jobs, thread_count)
    return new


def _memory_like(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    # NumPy asks for large pages; touching small pages for the first time takes longer than the move itself.
    memory = np.empty(tensor.numel() * tensor.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(tensor.dtype).reshape(tensor.shape)


def _jobs(move: Move, new: Tensor, loops: Loops | None) -> Iterator[Callable[[], bool]]:
    units, clients = move.regions.shared_units_and_clients() or (0, 0)
    if loops is None or clients < move.min_clients or move.old.dtype != torch.float32:
        yield partial(_move_by_pytorch, move, new)
        return
    # Dividing by a power of two is exact.
    divisor = units / move.scale
    old, total, target = (tensor.reshape(-1).numpy() for tensor in (move.old, move.total, new))
    for start in range(0, new.numel(), COMPILED_MOVE_CHUNK):
        stop = min(start + COMPILED_MOVE_CHUNK, new.numel())
        yield partial(loops.move, old, total, divisor, target, start, stop)


def _move_by_pytorch(move: Move, new: Tensor) -> bool:
    size = CPU_CHUNK if new.device.type == "cpu" else GPU_CHUNK
    tensors = (move.old, new, move.total, *move.regions.units_and_clients())
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
