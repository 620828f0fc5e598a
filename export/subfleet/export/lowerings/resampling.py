"""Upsampling, paddings that repeat elements, and their backwards, as maps of each dimension.

Shapes: N samples, C channels, one or two spatial dimensions.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings.separable import AxisMap, apply, apply_transposed, gather_axis

__all__ = ["RESAMPLINGS"]

aten = torch.ops.aten


def _nearest(size: int, output: int, scale: float | None) -> AxisMap:
    step = 1.0 / scale if scale else size / output
    return AxisMap(rows=tuple(((min(int(element * step), size - 1), 1.0),) for element in range(output)), size=size)


def _linear(size: int, output: int, scale: float | None, *, align_corners: bool) -> AxisMap:
    """Return the weights of the two neighbours of each sampled position, between corners or between element centres."""
    if align_corners:
        step = (size - 1) / (output - 1) if output > 1 else 0.0
    else:
        step = 1.0 / scale if scale else size / output
    rows = []
    for element in range(output):
        source = element * step if align_corners else max((element + 0.5) * step - 0.5, 0.0)
        first = min(int(source), size - 1)
        share = source - first
        second = min(first + 1, size - 1)
        rows.append(((first, 1.0 - share), (second, share)) if share and second != first else ((first, 1.0),))
    return AxisMap(rows=tuple(rows), size=size)


def _upsample(x: Tensor, sizes: Sequence[int], *scales: float | None) -> Tensor:
    maps = [_nearest(size, output, scale) for size, output, scale in _pairs(x.shape, sizes, scales)]
    return apply(x, maps)


def _pairs(
    shape: Sequence[int], sizes: Sequence[int], scales: Sequence[float | None]
) -> list[tuple[int, int, float | None]]:
    count = len(sizes)
    return list(zip(shape[-count:], sizes, (*scales, *[None] * count)[:count], strict=True))


def _upsample_backward(gradient: Tensor, sizes: Sequence[int], shape: Sequence[int], *scales: float | None) -> Tensor:
    maps = [_nearest(size, output, scale) for size, output, scale in _pairs(shape, sizes, scales)]
    return apply_transposed(gradient, maps)


def _interpolate(x: Tensor, sizes: Sequence[int], align_corners: bool, *scales: float | None) -> Tensor:
    pairs = _pairs(x.shape, sizes, scales)
    return apply(x, [_linear(*pair, align_corners=align_corners) for pair in pairs])


def _interpolate_backward(
    gradient: Tensor, sizes: Sequence[int], shape: Sequence[int], align_corners: bool, *scales: float | None
) -> Tensor:
    pairs = _pairs(shape, sizes, scales)
    return apply_transposed(gradient, [_linear(*pair, align_corners=align_corners) for pair in pairs])


def _reflect(element: int, size: int) -> int:
    return -element if element < 0 else (2 * (size - 1) - element if element >= size else element)


def _clamp(element: int, size: int) -> int:
    return min(max(element, 0), size - 1)


def _padding_maps(shape: Sequence[int], pads: Sequence[int], rule: Callable[[int, int], int]) -> list[AxisMap]:
    count = len(pads) // 2
    maps = []
    for axis in range(count):
        size = shape[len(shape) - count + axis]
        before, after = pads[2 * (count - 1 - axis)], pads[2 * (count - 1 - axis) + 1]
        rows = tuple(((rule(element, size), 1.0),) for element in range(-before, size + after))
        maps.append(AxisMap(rows=rows, size=size))
    return maps


def _pad_by(rule: Callable[[int, int], int]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def pad(x: Tensor, pads: Sequence[int]) -> Tensor:
        maps = _padding_maps(x.shape, pads, rule)
        for index, axis_map in enumerate(maps):
            x = x if axis_map.is_identity else gather_axis(x, x.dim() - len(maps) + index, axis_map)
        return x

    def backward(gradient: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
        return apply_transposed(gradient, _padding_maps(x.shape, pads, rule))

    return pad, backward


_REFLECT, _REFLECT_BACKWARD = _pad_by(_reflect)
_REPLICATE, _REPLICATE_BACKWARD = _pad_by(_clamp)

RESAMPLINGS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys((aten.upsample_nearest1d.default, aten.upsample_nearest2d.default), _upsample),
        **dict.fromkeys(
            (aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default), _upsample_backward
        ),
        **dict.fromkeys((aten.upsample_linear1d.default, aten.upsample_bilinear2d.default), _interpolate),
        **dict.fromkeys(
            (aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default),
            _interpolate_backward,
        ),
        **dict.fromkeys((aten.reflection_pad1d.default, aten.reflection_pad2d.default), _REFLECT),
        **dict.fromkeys(
            (aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default), _REFLECT_BACKWARD
        ),
        **dict.fromkeys((aten.replication_pad1d.default, aten.replication_pad2d.default), _REPLICATE),
        **dict.fromkeys(
            (aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default), _REPLICATE_BACKWARD
        ),
    }
)
