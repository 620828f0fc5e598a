"""Adaptive average pooling to a single position, which is a mean.

PyTorch computes it so as well, and then says by `as_strided_` how the result lies in memory where it was given channels
last, or a map of one position. No memory is laid out here, and a program has no such operator.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement

__all__ = ["POOLS"]


def _to_one(function: Any, dims: int) -> Replacement:
    def pool(
        _context: LayerContext,
        input: Tensor,  # noqa: A002 - PyTorch's name of it
        output_size: int | Sequence[int | None] | None,
    ) -> Tensor:
        sizes = output_size if isinstance(output_size, Sequence) else [output_size] * dims
        if any(size != 1 for size in sizes) or input.dim() <= dims:
            pooled: Tensor = function(input, output_size)
            return pooled
        return input.mean(dim=tuple(range(-dims, 0)), keepdim=True)

    return pool


_FUNCTIONS: Mapping[Any, int] = MappingProxyType(
    {
        functional.adaptive_avg_pool1d: 1,
        functional.adaptive_avg_pool2d: 2,
        functional.adaptive_avg_pool3d: 3,
    }
)
POOLS: Mapping[Any, Replacement] = MappingProxyType(
    {function: _to_one(function, dims) for function, dims in _FUNCTIONS.items()}
)
