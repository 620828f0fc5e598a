"""Adds rounded multiples of tensors to sums of integers, chunk by chunk, or nothing at all.

What limits the speed is memory: a sum takes twice the bytes of a float32 update, read and written. So chunks are small
enough for a core's cache, and all updates of a batch pass over a chunk of the sum while it is there. Changes are
checked in the same pass, for sums of integers can be taken back exactly: where one is refused, what was added before
it is added again with the opposite sign.

On the CPU whole tensors are added by a compiled loop where there is one (`subfleet.elastic.compiled_loops`). Either
way, and on a GPU, the bits are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import ADDED_TOGETHER, Loops, loops_and_threads
from subfleet.elastic.side_by_side import run_until_one_fails
from subfleet.protocol.errors import ProtocolError

__all__ = ["Term", "add_exactly"]

_CPU_CHUNK = 2**15
_COMPILED_CHUNK = 2**17
_GPU_CHUNK = 2**26
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """One addition: total += round(values * factor), where total may be a view.

    Attributes:
        name: of the tensor, for messages.
        total: int64.
        values: floats of the total's shape, on its device.
        factor: a number, or float64 that broadcasts against the values; at most 29 significant bits each.
        limit: of the absolute values.
        scatter: adds integers of the values' shape to the total, where that is no view of the same shape; None
            adds element to element.
    """

    name: str
    total: Tensor
    values: Tensor
    factor: float | Tensor
    limit: float
    scatter: Callable[[Tensor, Tensor], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Addition:
    """Some terms of one sum, at a stretch of its elements or of its rows.

    Attributes:
        terms: what is added.
        start: the first element or row.
        stop: behind the last one.
        add: takes the sign, -1 to take the terms back, and where to stop, and adds them from the start on. It returns
            the place up to which it has added all of them, and behind which none: before the stop where one is refused.
    """

    terms: Sequence[Term]
    start: int
    stop: int
    add: Callable[[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TermGroup:
    """Flat arrays of terms that the compiled loop adds together."""

    loops: Loops
    total: Any
    values: tuple[Any, ...]
    factors: tuple[float, ...]
    limit: np.float32

    def add(self, start: int, sign: int, stop: int) -> int:
        factors = tuple(sign * factor for factor in self.factors)
        return self.loops.add(self.total, self.values, factors, self.limit, start, stop)


def add_exactly(tensors: Sequence[Sequence[Sequence[Term]]]) -> None:
    """Add all terms, or none of them where one is refused.

    Args:
        tensors: for each tensor of sums its batches. The terms of a batch have the same total and pass over its chunks
            together. Tensors, and chunks of the only batch of a tensor, are added side by side on the CPU with as many
            threads as `torch.get_num_threads` says.

    Raises:
        ProtocolError: a value is not finite or above its limit.
    """
    values = [term.values for batches in tensors for batch in batches for term in batch]
    loops, thread_count = loops_and_threads(values)
    tried: list[tuple[_Addition, int]] = []
    jobs = []
    for batches in tensors:
        chunks = [chunk for batch in batches for chunk in _chunks(batch, loops)]
        # Batches of one tensor overlap, and must not be added to at the same time.
        jobs += chunks if len(batches) == 1 else [[addition for chunk in chunks for addition in chunk]]
    run_until_one_fails([partial(_add_in_turn, job, tried) for job in jobs], thread_count)
    refused = [addition for addition, reached in tried if reached < addition.stop]
    if refused:
        for addition, reached in tried:
            if reached > addition.start:
                addition.add(-1, reached)
        raise ProtocolError(_refusal(refused[0].terms))


def _add_in_turn(additions: Sequence[_Addition], tried: list[tuple[_Addition, int]]) -> bool:
    """Add until one is refused, and note how far each has come; False where one is refused."""
    for addition in additions:
        reached = addition.add(1, addition.stop)
        tried.append((addition, reached))
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
        size = _CPU_CHUNK if total.device.type == "cpu" else _GPU_CHUNK
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
    # In the type of the values, so that none is converted for the comparison; above all of them is no limit.
    limit = np.float32(min(batch[0].limit, _LARGEST_FLOAT32))
    groups = []
    for first in range(0, len(batch), ADDED_TOGETHER):
        terms = batch[first : first + ADDED_TOGETHER]
        values = [term.values.numpy().reshape(-1) for term in terms]
        factors = [float(term.factor) for term in terms]
        # Where the loop has places left, nothing of the first one.
        spare = ADDED_TOGETHER - len(terms)
        arrays, numbers = (*values, *values[:1] * spare), (*factors, *[0.0] * spare)
        groups.append((terms, _TermGroup(loops=loops, total=total, values=arrays, factors=numbers, limit=limit)))
    return [
        [
            _Addition(
                terms=terms, start=start, stop=min(start + _COMPILED_CHUNK, total.size), add=partial(group.add, start)
            )
            for terms, group in groups
        ]
        for start in range(0, total.size, _COMPILED_CHUNK)
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
    # Stated so that NaN, which max() hands on, is not allowed.
    return values.abs().max().item() <= limit


def _refusal(terms: Sequence[Term]) -> str:
    term = next(term for term in terms if not _is_allowed(term.values, term.limit))
    largest = term.values.abs().max().item()
    return f"tensor {term.name!r} of an update holds a change of {largest}, but must be finite and {term.limit} at most"
