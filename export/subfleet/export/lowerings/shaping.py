"""Operators that move elements, as reshapes, slices and pads; and their backwards."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _fill_like(number: float) -> Callable[..., Tensor]:
    """Create tensors like another one, filled with a number."""

    def like(tensor: Tensor, *sizes: Any, dtype: torch.dtype | None = None, **_options: object) -> Tensor:
        shape = tuple(sizes[0]) if sizes else tuple(tensor.shape)
        return torch.full(shape, number, dtype=dtype or tensor.dtype)

    return like


def _empty(sizes: Sequence[int], *, dtype: torch.dtype | None = None, **_options: object) -> Tensor:
    """Fill with zeros: otherwise two trainings of a network could differ."""
    return torch.full(tuple(sizes), 0, dtype=dtype or torch.get_default_dtype())


def _full_like(tensor: Tensor, number: float, *, dtype: torch.dtype | None = None, **_options: object) -> Tensor:
    return torch.full(tuple(tensor.shape), number, dtype=dtype or tensor.dtype)


def _new_full(
    tensor: Tensor, sizes: Sequence[int], number: float, *, dtype: torch.dtype | None = None, **_options: object
) -> Tensor:
    return torch.full(tuple(sizes), number, dtype=dtype or tensor.dtype)


def _fill(x: Tensor, number: float | Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(x.dtype).expand(x.shape)
    return torch.full(tuple(x.shape), number, dtype=x.dtype)


def _pad_dim(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Pad one dimension with zeros."""
    if not (before or after):
        return x
    behind = [0, 0] * (x.dim() - 1 - dim)
    padded: Tensor = aten.constant_pad_nd(x, [*behind, before, after], 0.0)
    return padded


def _constant_pad(x: Tensor, pads: list[int], number: float = 0.0) -> Any:
    """Turn a negative padding into a slice, which every runtime has; NotImplemented if there is none."""
    positive = [max(amount, 0) for amount in pads]
    for index, amount in enumerate(pads):
        if amount < 0:
            dim = x.dim() - 1 - index // 2
            start, end = (-amount, x.shape[dim]) if index % 2 == 0 else (0, x.shape[dim] + amount)
            x = aten.slice.Tensor(x, dim, start, end)
    if positive == list(pads):
        return NotImplemented
    return aten.constant_pad_nd(x, positive, number) if any(positive) else x.contiguous()


def _select_backward(gradient: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim, index = dim % len(sizes), index % sizes[dim]
    return _pad_dim(gradient.unsqueeze(dim), dim, index, sizes[dim] - index - 1)


def _slice_backward(gradient: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    dim = dim % len(sizes)
    size, count = sizes[dim], gradient.shape[dim]
    start = min(start + size if start < 0 else start, size)
    if step > 1:
        # Zeros after each element, in a separate dimension; the zeros after the last one are cut off.
        apart = _pad_dim(gradient.unsqueeze(dim + 1), dim + 1, 0, step - 1)
        wide = apart.reshape(*gradient.shape[:dim], count * step, *gradient.shape[dim + 1 :])
        excess = start + count * step - size
        gradient = aten.slice.Tensor(wide, dim, 0, count * step - excess) if excess > 0 else wide
    return _pad_dim(gradient, dim, start, size - start - gradient.shape[dim])


def _slice_scatter(
    x: Tensor, part: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return a tensor with a slice replaced by another one, as a change of a slice in place leaves it."""
    dim = dim % x.dim()
    size = x.shape[dim]
    first, last, step = slice(start, end, step).indices(size)
    if step == 1:
        before, behind = aten.slice.Tensor(x, dim, 0, first), aten.slice.Tensor(x, dim, max(first, last), size)
        return torch.cat([piece for piece in (before, part, behind) if piece.shape[dim]], dim)
    wide = _slice_backward(part, x.shape, dim, first, last, step)
    changed = torch.tensor([float(index in range(first, last, step)) for index in range(size)]) > 0.5
    return torch.where(changed.reshape(-1, *[1] * (x.dim() - 1 - dim)), wide, x)


def _select_scatter(x: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    start = index % x.shape[dim]
    return _slice_scatter(x, part.unsqueeze(dim), dim, start, start + 1)


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    parts, start = [], 0
    for size in sizes:
        parts.append(aten.slice.Tensor(x, dim % x.dim(), start, start + size))
        start += size
    return parts


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    total = x.shape[dim]
    return _split_with_sizes(x, [min(size, total - start) for start in range(0, total, size)], dim)


def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim % x.dim(), index) for index in range(x.shape[dim])]


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axis = dim % (tensors[0].dim() + 1)
    return torch.cat([tensor.unsqueeze(axis) for tensor in tensors], axis)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis, size = dim % x.dim(), x.shape[dim]
        first = (size - shift % size) % size
        if first:
            parts = [aten.slice.Tensor(x, axis, first, size), aten.slice.Tensor(x, axis, 0, first)]
            x = torch.cat(parts, axis)
    return x.contiguous()


def _triangle(keep_lower: bool) -> Callable[..., Tensor]:
    def cut(x: Tensor, diagonal: int = 0) -> Tensor:
        rows, columns = x.shape[-2:]
        mask = [
            [
                float((column <= row + diagonal) if keep_lower else (column >= row + diagonal))
                for column in range(columns)
            ]
            for row in range(rows)
        ]
        if x.dtype == torch.bool:
            return torch.logical_and(x, torch.tensor(mask, dtype=torch.float32) > 0.5)
        # Not a product: the elements that are cut off may be infinite.
        return torch.where(torch.tensor(mask, dtype=torch.float32) > 0.5, x, torch.zeros((), dtype=x.dtype))

    return cut


def _concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Leave out empty parts: PyTorch accepts a part of the shape (0,) beside any other."""
    parts = [tensor for tensor in tensors if tensor.numel()]
    if len(parts) == len(tensors) or not parts:
        return NotImplemented
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *lead, channels, height, width = x.shape
    count = len(lead)
    split = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    order = [*range(count), count, count + 3, count + 1, count + 4, count + 2]
    return split.permute(order).reshape(*lead, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *lead, channels, height, width = x.shape
    count = len(lead)
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    order = [*range(count), count, count + 2, count + 4, count + 1, count + 3]
    return split.permute(order).reshape(*lead, channels * factor**2, height // factor, width // factor)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    samples, channels, *sizes = x.shape
    split = x.reshape(samples, groups, channels // groups, math.prod(sizes))
    return split.transpose(1, 2).reshape(x.shape)


SHAPING: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), _fill_like(1)),
        **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default), _fill_like(0)),
        **dict.fromkeys((aten.empty_like.default, aten.new_empty.default), _fill_like(0)),
        aten.empty.memory_format: _empty,
        **dict.fromkeys((aten.split.Tensor, aten.unsafe_split.Tensor), _split),
        **dict.fromkeys((aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default), _split_with_sizes),
        aten.full_like.default: _full_like,
        aten.new_full.default: _new_full,
        aten.constant_pad_nd.default: _constant_pad,
        aten.select_backward.default: _select_backward,
        aten.slice_backward.default: _slice_backward,
        aten.fill.Scalar: _fill,
        aten.fill.Tensor: _fill,
        aten.zero.default: lambda x: _fill(x, 0),
        aten.slice_scatter.default: _slice_scatter,
        aten.select_scatter.default: _select_scatter,
        aten.squeeze.default: lambda x: x.reshape([size for size in x.shape if size != 1]),
        aten.unbind.int: _unbind,
        aten.stack.default: _stack,
        aten.roll.default: _roll,
        aten.tril.default: _triangle(keep_lower=True),
        aten.triu.default: _triangle(keep_lower=False),
        aten.cat.default: _concatenate,
        aten.pixel_shuffle.default: _pixel_shuffle,
        aten.pixel_unshuffle.default: _pixel_unshuffle,
        aten.channel_shuffle.default: _channel_shuffle,
    }
)
