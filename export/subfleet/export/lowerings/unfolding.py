"""Windows of an image, laid side by side (`nn.Unfold`), and their sum back into an image (`nn.Fold`).

Each dimension is mapped by itself: it has the elements of the first place in all windows, then those of the second.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings.separable import AxisMap, apply, apply_transposed

aten = torch.ops.aten


def _map_windows(
    sizes: Sequence[int],
    windows: Sequence[int],
    dilations: Sequence[int],
    paddings: Sequence[int],
    strides: Sequence[int],
) -> tuple[list[AxisMap], list[int]]:
    """Return the map of each dimension, and its number of windows. Padding is an output of no element."""
    maps, counts = [], []
    for size, window, dilation, padding, stride in zip(sizes, windows, dilations, paddings, strides, strict=True):
        count = (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        elements = (step * stride - padding + place * dilation for place in range(window) for step in range(count))
        rows = tuple(((element, 1.0),) if 0 <= element < size else () for element in elements)
        maps.append(AxisMap(rows=rows, size=size))
        counts.append(count)
    return maps, counts


def _unfold(x: Tensor, windows: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    """(N, C, height, width) to (N, C * window height * window width, windows)."""
    maps, counts = _map_windows(x.shape[-2:], windows, *geometry)
    split = apply(x, maps).reshape(*x.shape[:2], windows[0], counts[0], windows[1], counts[1])
    return split.permute(0, 1, 2, 4, 3, 5).reshape(x.shape[0], -1, counts[0] * counts[1])


def _fold(columns: Tensor, sizes: Sequence[int], windows: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    """Compute the backward of `_unfold`."""
    maps, counts = _map_windows(sizes, windows, *geometry)
    split = columns.reshape(columns.shape[0], -1, windows[0], windows[1], counts[0], counts[1])
    laid_out = split.permute(0, 1, 2, 4, 3, 5)
    return apply_transposed(laid_out.reshape(*laid_out.shape[:2], len(maps[0].rows), len(maps[1].rows)), maps)


UNFOLDINGS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.im2col.default: _unfold, aten.col2im.default: _fold}
)
