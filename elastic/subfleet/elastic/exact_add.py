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


def chunk_elements(device: torch.device) -> int:
    """How many elements of a sum should pass through the device at a time."""
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def add_exactly(groups: Sequence[Sequence[Term]]) -> None:
    """Add all terms, or none of them where one is refused.

    Args:
        groups: terms of different groups share no element of a total, so that groups can be added side by side: on
            the CPU with as many threads as `torch.get_num_threads` says.

    Raises:
        ProtocolError: a value is not finite or above its limit; the first such term in order is named.
    """
    elements = sum(term.values.numel() for group in groups for term in group)
    on_cpu = all(group[0].total.device.type == "cpu" for group in groups)
    large = on_cpu and elements >= _WORTH_COMPILING
    kernel = _compiled() if large else None
    thread_count = min(torch.get_num_threads(), len(groups)) if large else 1
    shares = [[term for group in groups[start::thread_count] for term in group] for start in range(thread_count)]
    if thread_count == 1:
        added = [_add_until_refused(share, kernel) for share in shares]
    else:
        with ThreadPoolExecutor(thread_count) as pool:
            added = list(pool.map(_add_until_refused, shares, [kernel] * thread_count))
    refused = [share[count] for share, count in zip(shares, added, strict=True) if count < len(share)]
    if refused:
        for share, count in zip(shares, added, strict=True):
            for term in share[:count]:
                _add(term, -1, kernel)
        raise ProtocolError(_refusal(refused[0]))


def _add_until_refused(terms: Sequence[Term], kernel: _Kernel | None) -> int:
    """How many terms were added before one was refused, which has not been added."""
    for place, term in enumerate(terms):
        if not _add(term, 1, kernel):
            return place
    return len(terms)


def _add(term: Term, sign: int, kernel: _Kernel | None) -> bool:
    """Add a term, or with -1 take it back; False where it is refused."""
    values, total, factor = term.values, term.total, term.factor
    plain = isinstance(factor, float) and term.scatter is None and values.dtype == torch.float32
    if kernel is not None and plain and values.is_contiguous() and total.is_contiguous():
        # In the type of the values, so that none is converted for the comparison; above all of them is no limit.
        limit = np.float32(min(term.limit, _LARGEST_FLOAT32))
        return kernel(total.numpy().reshape(-1), values.numpy().reshape(-1), sign * factor, limit)
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

    def add_rounded(total, values, factor, limit):  # type: ignore[no-untyped-def]
        refused = 0
        for place in range(values.size):
            # So that NaN counts, too.
            refused |= not abs(values[place]) <= limit
        if refused:
            return False
        for place in range(total.size):
            total[place] += np.int64(np.rint(np.float64(values[place]) * factor))
        return True

    # nogil: threads add to different chunks at the same time. No fast mathematics: it may leave out NaN.
    kernel: _Kernel = numba.njit(nogil=True, error_model="numpy")(add_rounded)
    return kernel
