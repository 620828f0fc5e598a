"""Sums of rounded tensors as integers, and the mean that moves a model, chunk by chunk.

`add_exactly` adds rounded multiples of tensors to int64 sums, or nothing at all. Memory bandwidth limits its speed: a
sum takes twice the bytes of a float32 update, read and written. Chunks therefore fit a core's cache, and all updates
pass over a chunk while it is there, whatever part of the tensor each of them holds. Changes are checked in the same
pass, because integer sums can be undone exactly: if a change is refused, all that was added before it is subtracted.

`move_tensors` moves a model by the exact mean of a sum. On the CPU both use compiled loops where Numba is installed
(`subfleet.elastic.compiled_loops`); the bits are the same without them and on a GPU.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import ADDED_TOGETHER, Loops, loops_and_threads
from subfleet.elastic.held_regions import HeldRegion, HeldRegions
from subfleet.elastic.maps import Gather
from subfleet.elastic.region_rows import RegionRows
from subfleet.protocol.errors import ProtocolError

CPU_CHUNK = 2**15
COMPILED_ADD_CHUNK = 2**18
COMPILED_MOVE_CHUNK = 2**18
GPU_CHUNK = 2**26
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """One addition of round(values * factor) to the elements of a region.

    Attributes:
        name: name of the tensor, for messages.
        total: int64 sum of the whole tensor.
        values: floats on the device of the total, in the shape of the region.
        factor: a number, or a float64 tensor that broadcasts against the values; at most 29 significant bits each.
        limit: largest absolute value.
        region: where they are added.
    """

    name: str
    total: Tensor
    values: Tensor
    factor: float | Tensor
    limit: float
    region: HeldRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Addition:
    """Terms of one sum, in a range of elements or rows.

    Attributes:
        terms: the terms.
        start: first element or row.
        stop: end of the range, exclusive.
        add: (start, sign, stop) adds the terms from `start` on, or subtracts them with sign -1. Returns the position up
            to which all terms were added; beyond it none was. It is below `stop` if a term was refused.
    """

    terms: Sequence[Term]
    start: int
    stop: int
    add: Callable[[int, int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TermGroup:
    """Flat arrays of the terms of one region for a call of the compiled loop: one, or up to `ADDED_TOGETHER`."""

    loops: Loops
    terms: Sequence[Term]
    rows: RegionRows

    def cut(self) -> Iterator[_Addition | None]:
        """The addition in each chunk of the tensor; None where the region has no row."""
        add = self._bind()
        for start, stop in pairwise(self.rows.chunks):
            yield _Addition(terms=self.terms, start=start, stop=stop, add=add) if start < stop else None

    def _bind(self) -> Callable[[int, int, int], int]:
        """The loop with these terms: (start, sign, stop) to the row that it reached."""
        first, loops = self.terms[0], self.loops
        total = first.total.numpy().reshape(-1)
        values = [term.values.numpy().reshape(-1) for term in self.terms]
        factors = [float(term.factor) for term in self.terms]
        # float32 like the values, so that the comparison converts nothing; a larger limit is no limit.
        limit = np.float32(min(first.limit, _LARGEST_FLOAT32))
        rows = self.rows.arrays
        if len(self.terms) == 1:
            return lambda start, sign, stop: loops.add(total, values[0], sign * factors[0], limit, rows, (start, stop))
        # Unused slots of the loop add 0 times the first array.
        spare = ADDED_TOGETHER - len(self.terms)
        arrays, numbers = (*values, *values[:1] * spare), (*factors, *[0.0] * spare)
        return lambda start, sign, stop: loops.add_together(
            total, arrays, tuple(sign * number for number in numbers), limit, rows, (start, stop)
        )


def add_exactly(tensors: Sequence[Sequence[Term]]) -> None:
    """Add all terms, or none if one is refused.

    Args:
        tensors: the terms of each summed tensor, which share its total. On the CPU they pass over its chunks together,
            and `torch.get_num_threads()` threads work on different chunks.

    Raises:
        ProtocolError: a value is not finite or exceeds its limit.
    """
    loops, thread_count = loops_and_threads([term.values for terms in tensors for term in terms])
    progress: list[tuple[_Addition, int]] = []
    jobs = [job for terms in tensors for job in _list_jobs(terms, loops)]
    run_until_one_fails([partial(_add_in_turn, job, progress) for job in jobs], thread_count)
    refused = [addition for addition, reached in progress if reached < addition.stop]
    if refused:
        for addition, reached in progress:
            if reached > addition.start:
                addition.add(addition.start, -1, reached)
        raise ProtocolError(_refusal(refused[0].terms))


def _add_in_turn(additions: Sequence[_Addition], progress: list[tuple[_Addition, int]]) -> bool:
    """Add in order, recording how far each addition got; stop and return False when one is refused."""
    for addition in additions:
        reached = addition.add(addition.start, 1, addition.stop)
        progress.append((addition, reached))
        if reached < addition.stop:
            return False
    return True


def _list_jobs(terms: Sequence[Term], loops: Loops | None) -> list[list[_Addition]]:
    """The additions to a tensor: lists that may run at the same time, because their elements differ."""
    plain = [term for term in terms if _is_plain(term)] if loops is not None else []
    others = [addition for term in terms if not plain or not _is_plain(term) for addition in _list_additions(term)]
    chunks = _list_chunks(plain, loops) if loops is not None and plain else []
    # Others are anywhere in the tensor.
    return [[*(addition for chunk in chunks for addition in chunk), *others]] if others else chunks


def _list_chunks(terms: Sequence[Term], loops: Loops) -> list[list[_Addition]]:
    """The additions in each chunk of a tensor, which fits a core's cache with all of its terms."""
    chunk = max(term.region.find_chunk(COMPILED_ADD_CHUNK) for term in terms)
    alike: dict[Hashable, list[Term]] = {}
    for term in terms:
        alike.setdefault(term.region.key, []).append(term)
    groups = [
        _TermGroup(loops=loops, terms=own[first : first + ADDED_TOGETHER], rows=own[0].region.find_rows(chunk))
        for own in alike.values()
        for first in range(0, len(own), ADDED_TOGETHER)
    ]
    cut = zip(*(group.cut() for group in groups), strict=True)
    return [[addition for addition in additions if addition is not None] for additions in cut]


def _list_additions(term: Term) -> Iterator[_Addition]:
    """The additions of a term by PyTorch."""
    total, region = term.total, term.region
    rows, step = 1, 1
    if (region.whole or region.is_view) and total.dim():
        total = total if region.whole else region.map.extract(total)
        size = CPU_CHUNK if total.device.type == "cpu" else GPU_CHUNK
        rows, step = total.shape[0], max(1, size * total.shape[0] // total.numel())
    add = partial(_add_rows, term, total)
    for start in range(0, rows, step):
        yield _Addition(terms=[term], start=start, stop=min(start + step, rows), add=add)


def _is_plain(term: Term) -> bool:
    return (
        isinstance(term.factor, float)
        and isinstance(term.region.map, Gather)
        and term.values.dtype == torch.float32
        and term.values.is_contiguous()
        and term.total.is_contiguous()
    )


def _add_rows(term: Term, total: Tensor, start: int, sign: int, stop: int) -> int:
    values, factor, is_part = term.values, term.factor, term.region.whole or term.region.is_view
    if is_part and total.dim():
        total, values = total[start:stop], values[start:stop]
        factor = factor.expand(term.values.shape)[start:stop] if isinstance(factor, Tensor) else factor
    if not _is_allowed(values, term.limit):
        return start
    units = values.to(torch.float64).mul_(factor).round_().to(torch.int64)
    if sign < 0:
        units.neg_()
    if is_part:
        total.add_(units)
    else:
        term.region.map.scatter(units, total)
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
    if loops is None or move.old.dtype != torch.float32:
        yield partial(_move_by_pytorch, move, new)
        return
    old, total, target = (tensor.reshape(-1).numpy() for tensor in (move.old, move.total, new))
    counts = tuple(cells.numpy() for cells in move.regions.cell_units_and_clients())
    for start in range(0, new.numel(), COMPILED_MOVE_CHUNK):
        span = start, min(start + COMPILED_MOVE_CHUNK, new.numel())
        yield partial(loops.move, old, total, counts, (move.min_clients, move.scale), target, span)


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
