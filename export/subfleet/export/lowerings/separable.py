"""Linear maps that act on each spatial dimension separately: average pooling, resampling, and their backwards.

Such a map is one small constant matrix for each dimension, and its backward is the transposed matrices. If windows are
equal and adjacent, or each element is repeated, a reshape does the same without a product.

No runtime has an operator for the backwards of pooling and resampling, so this form is the only one; it is not a matter
of speed, and has no row in `benchmarks/results/train-step.md`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMap:
    """A linear map of one dimension.

    Attributes:
        rows: for each output element, the input elements that it sums, with their weights.
        size: of the input.
    """

    rows: tuple[tuple[tuple[int, float], ...], ...]
    size: int

    @property
    def is_identity(self) -> bool:
        """Whether the map changes nothing."""
        return self.rows == tuple(((index, 1.0),) for index in range(self.size))

    def even_window(self) -> tuple[int, float] | None:
        """Return length and weight of the windows if they are equal, adjacent, and cover the input; otherwise None."""
        window = len(self.rows[0])
        weight = self.rows[0][0][1] if window else 0.0
        even = tuple(
            tuple((index * window + step, weight) for step in range(window)) for index in range(len(self.rows))
        )
        return (window, weight) if window and window * len(self.rows) == self.size and self.rows == even else None

    def even_repeat(self) -> int | None:
        """Return how often each element is repeated in sequence, unweighted; None if the map is something else."""
        times = len(self.rows) // self.size
        even = tuple(((index // times, 1.0),) for index in range(len(self.rows))) if times else ()
        return times if times and times * self.size == len(self.rows) and self.rows == even else None

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the map as a matrix (output, input)."""
        dense = [[0.0] * self.size for _ in self.rows]
        for row, terms in zip(dense, self.rows, strict=True):
            for column, weight in terms:
                row[column] += weight
        return torch.tensor(dense, dtype=dtype)


def _split_axis(x: Tensor, axis: int, parts: int) -> Tensor:
    """Split a dimension into (size / parts, parts)."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])


def _repeat_axis(x: Tensor, axis: int, times: int) -> Tensor:
    """Repeat each element `times` times in sequence."""
    wide = x.unsqueeze(axis + 1).expand(*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    return wide.reshape(*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])


def _product(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Map the last dimension, or the one before it, by a matrix (output, input)."""
    out, size = matrix.shape
    if axis == x.dim() - 1:
        return torch.mm(x.reshape(-1, size), matrix.t()).reshape(*x.shape[:-1], out)
    planes = x.reshape(-1, size, x.shape[-1])
    product = torch.bmm(matrix.unsqueeze(0).expand(planes.shape[0], out, size), planes)
    return product.reshape(*x.shape[:-2], out, x.shape[-1])


def apply(x: Tensor, maps: Sequence[AxisMap]) -> Tensor:
    """Map the trailing dimensions of `x`, one or two, each by its own map."""
    weight = 1.0
    # The last dimension first: its product needs no transposition, and the rest is then smaller.
    for axis in reversed(range(x.dim() - len(maps), x.dim())):
        axis_map = maps[axis - x.dim()]
        if axis_map.is_identity:
            continue
        window, times = axis_map.even_window(), axis_map.even_repeat()
        if window is not None:
            x, weight = _split_axis(x, axis, window[0]).sum(axis + 1), weight * window[1]
        elif times is not None:
            x = _repeat_axis(x, axis, times)
        else:
            x = _product(x, axis, axis_map.matrix(x.dtype))
    return x if weight == 1.0 else x * weight


def apply_transposed(gradient: Tensor, maps: Sequence[AxisMap]) -> Tensor:
    """Compute the backward of `apply`."""
    weight = 1.0
    steps = []
    for axis in range(gradient.dim() - len(maps), gradient.dim()):
        axis_map = maps[axis - gradient.dim()]
        window, times = axis_map.even_window(), axis_map.even_repeat()
        if window is not None:
            weight *= window[1]
        steps.append((axis, axis_map, window, times))
    if weight != 1.0:
        gradient = gradient * weight  # while it is small
    for axis, axis_map, window, times in steps:
        if axis_map.is_identity:
            continue
        if window is not None:
            gradient = _repeat_axis(gradient, axis, window[0])
        elif times is not None:
            gradient = _split_axis(gradient, axis, times).sum(axis + 1)
        else:
            gradient = _product(gradient, axis, axis_map.matrix(gradient.dtype).t())
    return gradient


def gather_axis(x: Tensor, axis: int, axis_map: AxisMap) -> Tensor:
    """Apply a map with rows of one element each, with weight 1: exactly, even if others are infinite."""
    return x.index_select(axis, torch.tensor([row[0][0] for row in axis_map.rows]))


aten = torch.ops.aten


def _nearest(size: int, output: int, scale: float | None) -> AxisMap:
    step = 1.0 / scale if scale else size / output
    return AxisMap(rows=tuple(((min(int(element * step), size - 1), 1.0),) for element in range(output)), size=size)


def _find_step(size: int, output: int, scale: float | None, *, align_corners: bool) -> float:
    """Return the distance of sampled positions, in elements of the input."""
    if align_corners:
        return (size - 1) / (output - 1) if output > 1 else 0.0
    return 1.0 / scale if scale else size / output


def _linear(size: int, output: int, scale: float | None, *, align_corners: bool) -> AxisMap:
    """Return the weights of the two neighbours of each sampled position, between corners or between element centres."""
    step = _find_step(size, output, scale, align_corners=align_corners)
    rows = []
    for element in range(output):
        source = element * step if align_corners else max((element + 0.5) * step - 0.5, 0.0)
        first = min(int(source), size - 1)
        share = source - first
        second = min(first + 1, size - 1)
        rows.append(((first, 1.0 - share), (second, share)) if share and second != first else ((first, 1.0),))
    return AxisMap(rows=tuple(rows), size=size)


_CUBIC = -0.75
"""The slope at the neighbours (Keys 1981, "Cubic convolution interpolation"), as PyTorch has it."""


def _cubic(size: int, output: int, scale: float | None, *, align_corners: bool) -> AxisMap:
    """Return the weights of the four neighbours of each sampled position; beyond an end, its element is repeated."""
    step = _find_step(size, output, scale, align_corners=align_corners)
    rows = []
    for element in range(output):
        source = element * step if align_corners else (element + 0.5) * step - 0.5
        first = math.floor(source)
        neighbours = ((first + offset, abs(source - first - offset)) for offset in (-1, 0, 1, 2))
        rows.append(tuple((_clamp(place, size), _weigh_cubic(distance)) for place, distance in neighbours))
    return AxisMap(rows=tuple(rows), size=size)


def _weigh_cubic(distance: float) -> float:
    if distance <= 1:
        return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


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


def _interpolate_by(weigh: Callable[..., AxisMap]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def interpolate(x: Tensor, sizes: Sequence[int], align_corners: bool, *scales: float | None) -> Tensor:
        pairs = _pairs(x.shape, sizes, scales)
        return apply(x, [weigh(*pair, align_corners=align_corners) for pair in pairs])

    def backward(
        gradient: Tensor, sizes: Sequence[int], shape: Sequence[int], align_corners: bool, *scales: float | None
    ) -> Tensor:
        pairs = _pairs(shape, sizes, scales)
        return apply_transposed(gradient, [weigh(*pair, align_corners=align_corners) for pair in pairs])

    return interpolate, backward


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

_INTERPOLATE, _INTERPOLATE_BACKWARD = _interpolate_by(_linear)
_BICUBIC, _BICUBIC_BACKWARD = _interpolate_by(_cubic)

RESAMPLINGS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys((aten.upsample_nearest1d.default, aten.upsample_nearest2d.default), _upsample),
        **dict.fromkeys(
            (aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default), _upsample_backward
        ),
        **dict.fromkeys((aten.upsample_linear1d.default, aten.upsample_bilinear2d.default), _INTERPOLATE),
        **dict.fromkeys(
            (aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default),
            _INTERPOLATE_BACKWARD,
        ),
        aten.upsample_bicubic2d.default: _BICUBIC,
        aten.upsample_bicubic2d_backward.default: _BICUBIC_BACKWARD,
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
