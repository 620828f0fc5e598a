"""Average and maximum pooling, plain and adaptive, and their backwards, in one and two dimensions.

Shapes: N samples, C channels, spatial dimensions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings.separable import AxisMap, apply, apply_transposed, gather_axis

aten = torch.ops.aten


def _per_axis(given: Sequence[int], default: Sequence[int] = (0, 0)) -> tuple[int, int]:
    """Return two numbers from one for both dimensions, two, or none."""
    values = [int(value) for value in given] or list(default)
    return (values[0], values[-1])


def pooled_size(size: int, window: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool) -> int:
    """Return the number of windows in one dimension; none starts in the padding behind the input."""
    space = size + 2 * padding - dilation * (window - 1) - 1
    count = (-(-space // stride) if ceil_mode else space // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _average_maps(sizes: Sequence[int], arguments: Sequence[Any]) -> tuple[list[AxisMap], float]:
    """Return the maps of an average pool, and the remaining factor. Arguments as in `aten.avg_pool2d`."""
    defaults: list[Any] = [[], [0], False, True, None]
    kernel, stride, padding, ceil_mode, count_padding, divisor = [*arguments, *defaults[len(arguments) - 1 :]]
    windows, paddings = _per_axis(kernel), _per_axis(padding)
    strides = _per_axis(stride, windows)
    maps = []
    for size, window, step, pad in zip(sizes, windows, strides, paddings, strict=True):
        rows = []
        for window_index in range(pooled_size(size, window, step, pad, 1, ceil_mode=bool(ceil_mode))):
            start = window_index * step - pad
            end = min(start + window, size + pad)
            first, last = max(start, 0), min(end, size)
            count = 1 if divisor else (end - start if count_padding else last - first)
            rows.append(tuple((column, 1.0 / count) for column in range(first, last)))
        maps.append(AxisMap(rows=tuple(rows), size=size))
    return maps, 1.0 / divisor if divisor else 1.0


def _average_pool(x: Tensor, *arguments: Any) -> Tensor:
    maps, factor = _average_maps(x.shape[-2:], arguments)
    output = apply(x, maps)
    return output if factor == 1.0 else output * factor


def _average_pool_backward(gradient: Tensor, x: Tensor, *arguments: Any) -> Tensor:
    maps, factor = _average_maps(x.shape[-2:], arguments)
    return apply_transposed(gradient if factor == 1.0 else gradient * factor, maps)


def _adaptive_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Return start and end of each part, as PyTorch cuts them; parts overlap if the size is not a multiple."""
    return [(part * size // parts, -(-(part + 1) * size // parts)) for part in range(parts)]


def _adaptive_average_maps(sizes: Sequence[int], output_sizes: Sequence[int]) -> list[AxisMap]:
    maps = []
    for size, parts in zip(sizes, output_sizes, strict=True):
        bounds = _adaptive_bounds(size, parts)
        rows = tuple(tuple((column, 1.0 / (end - start)) for column in range(start, end)) for start, end in bounds)
        maps.append(AxisMap(rows=rows, size=size))
    return maps


def _adaptive_average_pool(x: Tensor, output_sizes: Sequence[int]) -> Tensor:
    return apply(x, _adaptive_average_maps(x.shape[-2:], output_sizes))


def _adaptive_average_pool_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return apply_transposed(gradient, _adaptive_average_maps(x.shape[-2:], gradient.shape[-2:]))


def _adaptive_gather(sizes: Sequence[int], output_sizes: Sequence[int]) -> tuple[list[AxisMap], list[int]]:
    """Return maps that lay all windows of an adaptive pool side by side, and the common size of the windows.

    A shorter window repeats its last element: no maximum changes, and the first of equal elements stays the first.
    """
    maps, windows = [], []
    for size, parts in zip(sizes, output_sizes, strict=True):
        bounds = _adaptive_bounds(size, parts)
        window = max(end - start for start, end in bounds)
        elements = [min(start + step, end - 1) for start, end in bounds for step in range(window)]
        maps.append(AxisMap(rows=tuple(((element, 1.0),) for element in elements), size=size))
        windows.append(window)
    return maps, windows


def _adaptive_maximum_pool(x: Tensor, output_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return values, and indices within the windows laid side by side, which the backward takes."""
    maps, windows = _adaptive_gather(x.shape[-2:], output_sizes)
    for axis, axis_map in zip((x.dim() - 2, x.dim() - 1), maps, strict=True):
        x = x if axis_map.is_identity else gather_axis(x, axis, axis_map)
    values, indices = aten.max_pool2d_with_indices(x, windows, windows)
    return values, indices


def _adaptive_maximum_pool_backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    maps, windows = _adaptive_gather(x.shape[-2:], gradient.shape[-2:])
    laid_out = x
    for axis, axis_map in zip((x.dim() - 2, x.dim() - 1), maps, strict=True):
        laid_out = laid_out if axis_map.is_identity else gather_axis(laid_out, axis, axis_map)
    spread = aten.max_pool2d_with_indices_backward(gradient, laid_out, windows, windows, [0, 0], [1, 1], False, indices)
    return apply_transposed(spread, maps)


def _maximum_pool_backward(gradient: Tensor, x: Tensor, *arguments: Any) -> Tensor:
    """Add each window's gradient at the position of its maximum."""
    indices = arguments[-1]
    planes, positions = math.prod(x.shape[:-2]), math.prod(x.shape[-2:])
    zeros = torch.zeros((planes, positions), dtype=gradient.dtype)
    added = torch.scatter_add(zeros, 1, indices.reshape(planes, -1), gradient.reshape(planes, -1))
    return added.reshape(x.shape)


AVERAGE_POOLS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.avg_pool2d.default: _average_pool,
        aten.avg_pool2d_backward.default: _average_pool_backward,
        aten._adaptive_avg_pool2d.default: _adaptive_average_pool,  # noqa: SLF001 - the operator's name
        aten._adaptive_avg_pool2d_backward.default: _adaptive_average_pool_backward,  # noqa: SLF001
    }
)
MAXIMUM_POOL_BACKWARD: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.max_pool2d_with_indices_backward.default: _maximum_pool_backward}
)
MAXIMUM_POOLS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.adaptive_max_pool2d.default: _adaptive_maximum_pool,
        aten.adaptive_max_pool2d_backward.default: _adaptive_maximum_pool_backward,
    }
)
