"""Circular padding, which PyTorch writes into a new tensor in place."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement

__all__ = ["PADDINGS"]


def _pad(
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    if mode != "circular" or min(pad) < 0:
        return functional.pad(input, list(pad), mode, value)
    for axis_from_last in range(len(pad) // 2):
        dim, (before, after) = input.dim() - 1 - axis_from_last, pad[2 * axis_from_last : 2 * axis_from_last + 2]
        size = input.shape[dim]
        parts = [input.narrow(dim, size - before, before), input, input.narrow(dim, 0, after)]
        input = torch.cat([part for part in parts if part.shape[dim]], dim)  # noqa: A001 - the result so far
    return input


PADDINGS: Mapping[Any, Replacement] = MappingProxyType({functional.pad: _pad})
