"""Which places of a convolution's input and output each place of its kernel connects, as constant bands of ones.

Shapes: as in `convolution_geometry`; Q places of the input and P of the output, over all dimensions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry

__all__ = ["axis_bands", "bands"]


def axis_bands(axis: int, kernel: int, size: int, places: int, at: Geometry, dtype: torch.dtype) -> Tensor:
    """(K, Q, P) along one dimension: 1 where a place of the kernel connects one of the input to one of the output."""
    step = torch.arange(kernel).reshape(-1, 1, 1) * at.dilation[axis]
    output = torch.arange(places).reshape(1, 1, -1) * at.stride[axis]
    return (torch.arange(size).reshape(1, -1, 1) == step + output - at.padding[axis]).to(dtype)


def bands(
    kernel: Sequence[int], sizes: Sequence[int], places: Sequence[int], at: Geometry, dtype: torch.dtype
) -> Tensor:
    """(K, Q, P) over all dimensions, each flattened."""
    spans = zip(kernel, sizes, places, strict=True)
    first, *others = (axis_bands(axis, *span, at, dtype) for axis, span in enumerate(spans))
    for band in others:
        (k, q, p), (length, size, length_out) = first.shape, band.shape
        outer = first.reshape(k, 1, q, 1, p, 1) * band.reshape(1, length, 1, size, 1, length_out)
        first = outer.reshape(k * length, q * size, p * length_out)
    return first
