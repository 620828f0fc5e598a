"""Adds rounded multiples of tensors to sums of integers, chunk by chunk, or nothing at all.

What limits the speed is memory: a sum takes twice the bytes of a float32 update, read and written. So chunks are small
enough for a core's cache, and all updates of a batch pass over a chunk of the sum while it is there. Changes are
checked in the same pass, for sums of integers can be taken back exactly: where one is refused, what was added before
it is added again with the opposite sign.

On the CPU the two loops over a chunk are compiled by Numba where it is installed; PyTorch would write the converted,
scaled, rounded and integer numbers to memory in four passes. Either way, and on a GPU, the bits are the same.
"""

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subfleet.protocol.errors import ProtocolError

__all__ = ["Term", "add_exactly", "chunk_elements"]

_CPU_CHUNK = 2**15
_GPU_CHUNK = 2**26
_WORTH_COMPILING = 2**20
"""Elements from which compiling, half a second for each process, and threads pay off."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max

_Kernel = Callable[..., bool]


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
class _Piece:
    """A chunk of a sum and all that is added to it: rows of the first dimension, or of flat arrays for the kernel."""

    terms: Sequence[Term]
    start: int
    stop: int
    arrays: Sequence[tuple[Any, Any, Any, Any]] | None

    def add(self, place: int, sign: int, kernel: _Kernel | None) -> bool:
        """Add one of the terms, or with -1 take it back; False where it is refused."""
        if kernel is not None and self.arrays is not None:
            total, values, factor, limit = self.arrays[place]
            return kernel(total, values, sign * factor, limit, self.start, self.stop)
        return _add_rows(self.terms[place], slice(self.start, self.stop), sign)


def chunk_elements(device: torch.device) -> int:
    """How many elements of a sum should pass through the device at a time."""
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def add_exactly(tensors: Sequence[Sequence[Sequence[Term]]]) -> None:
    """Add all terms, or none of them where one is refused.

    Args:
        tensors: for each tensor of sums its batches. The terms of a batch have the same total and pass over its chunks
            together. Tensors, and chunks of the only batch of a tensor, are added side by side on the CPU with as many
            threads as `torch.get_num_threads` says.

    Raises:
        ProtocolError: a value is not finite or above its limit.
    """
    terms = [term for batches in tensors for batch in batches for term in batch]
    on_cpu = all(term.total.device.type == "cpu" for term in terms)
    large = on_cpu and sum(term.values.numel() for term in terms) >= _WORTH_COMPILING
    kernel = _compiled() if large else None
    thread_count = torch.get_num_threads() if large else 1
    shares: list[list[_Piece]] = [[] for _ in range(thread_count)]
    for number, batches in enumerate(tensors):
        pieces = [piece for batch in batches for piece in _pieces(batch, compiled=kernel is not None)]
        for place, piece in enumerate(pieces):
            # Batches of one tensor overlap, and must not be added to at the same time.
            shares[(place if len(batches) == 1 else number) % thread_count].append(piece)
    if thread_count == 1:
        added = [_add_until_refused(shares[0], kernel)]
    else:
        with ThreadPoolExecutor(thread_count) as pool:
            added = list(pool.map(_add_until_refused, shares, [kernel] * thread_count))
    refused = [
        share[len(counts) - 1].terms[counts[-1]]
        for share, counts in zip(shares, added, strict=True)
        if counts and counts[-1] < len(share[len(counts) - 1].terms)
    ]
    if refused:
        for share, counts in zip(shares, added, strict=True):
            for piece, count in zip(share, counts, strict=False):
                for place in range(count):
                    piece.add(place, -1, kernel)
        raise ProtocolError(_refusal(refused[0]))


def _pieces(batch: Sequence[Term], *, compiled: bool) -> list[_Piece]:
    first = batch[0]
    total = first.total
    arrays = None
    if compiled and all(_is_plain(term) for term in batch):
        # In the type of the values, so that none is converted for the comparison; above all of them is no limit.
        limit = np.float32(min(first.limit, _LARGEST_FLOAT32))
        flat = total.numpy().reshape(-1)
        arrays = [(flat, term.values.numpy().reshape(-1), term.factor, limit) for term in batch]
    if first.scatter is not None or total.dim() == 0:
        return [_Piece(terms=batch, start=0, stop=0, arrays=None)]
    rows, step = total.shape[0], max(1, chunk_elements(total.device) * total.shape[0] // total.numel())
    if arrays is not None:
        rows, step = total.numel(), chunk_elements(total.device)
    return [
        _Piece(terms=batch, start=start, stop=min(start + step, rows), arrays=arrays) for start in range(0, rows, step)
    ]


def _is_plain(term: Term) -> bool:
    return (
        isinstance(term.factor, float)
        and term.scatter is None
        and term.values.dtype == torch.float32
        and term.values.is_contiguous()
        and term.total.is_contiguous()
    )


def _add_until_refused(pieces: Sequence[_Piece], kernel: _Kernel | None) -> list[int]:
    """How many terms of each piece were added, up to the first piece of which one was refused."""
    counts = []
    for piece in pieces:
        count = 0
        while count < len(piece.terms) and piece.add(count, 1, kernel):
            count += 1
        counts.append(count)
        if count < len(piece.terms):
            break
    return counts


def _add_rows(term: Term, rows: slice, sign: int) -> bool:
    total, values, factor = term.total, term.values, term.factor
    if term.scatter is None and total.dim():
        total, values = total[rows], values[rows]
        factor = factor.expand(term.values.shape)[rows] if isinstance(factor, Tensor) else factor
    # Stated so that NaN, which max() hands on, fails it too.
    if not values.abs().max().item() <= term.limit:
        return False
    units = values.to(torch.float64).mul_(factor).round_().to(torch.int64)
    if sign < 0:
        units.neg_()
    if term.scatter is None:
        total.add_(units)
    else:
        term.scatter(units, total)
    return True


def _refusal(term: Term) -> str:
    largest = term.values.abs().max().item()
    return f"tensor {term.name!r} of an update holds a change of {largest}, but must be finite and {term.limit} at most"


@cache
def _compiled() -> _Kernel | None:
    """The two loops over a chunk as machine code; None where there is no Numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    def add_rounded(total, values, factor, limit, start, stop):  # type: ignore[no-untyped-def]
        # Sliced first: indices that might be negative would keep the loops from being vectorised.
        total, values = total[start:stop], values[start:stop]
        allowed = True
        for place in range(values.size):
            # NaN is not allowed, either.
            allowed &= abs(values[place]) <= limit
        if allowed:
            for place in range(values.size):
                total[place] += np.int64(np.rint(np.float64(values[place]) * factor))
        return allowed

    # nogil: threads add to different chunks at the same time. No fast mathematics: it may leave out NaN.
    kernel: _Kernel = numba.njit(nogil=True, error_model="numpy")(add_rounded)
    return kernel
