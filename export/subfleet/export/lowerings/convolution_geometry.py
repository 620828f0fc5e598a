"""The geometry of a convolution: where its kernel meets its input.

Shapes: N samples, C channels in, O channels out, G groups, sizes S of the input, P of the output, K of the kernel; in
bands of ones, Q positions of the input and P of the output over all dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The settings of an ordinary convolution; one number for each dimension, first to last.

    Attributes:
        stride: input positions between two output positions.
        padding: zeros on both sides of the input.
        dilation: input positions between two kernel positions.
        groups: of channels that do not meet.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def reach(self, kernel: Sequence[int]) -> list[int]:
        """Return the distance of a kernel's last position from its first, for each dimension."""
        return [step * (size - 1) for step, size in zip(self.dilation, kernel, strict=True)]

    def measure_extent(self, kernel: Sequence[int], outputs: Sequence[int]) -> list[int]:
        """Return how many positions of the padded input such an output depends on, from the first to the last."""
        ends = zip(self.stride, outputs, self.reach(kernel), strict=True)
        return [step * (size - 1) + reach + 1 for step, size, reach in ends]


def convolve(
    x_ncs: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolve without bias."""
    ones, zeros = [1] * (x_ncs.dim() - 2), [0] * (x_ncs.dim() - 2)
    settings = (list(stride or ones), list(padding or zeros), list(dilation or ones), False, zeros, groups)
    output: Tensor = aten.convolution.default(x_ncs, weight, None, *settings)
    return output


def pad(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Pad the last dimensions with zeros, as many dimensions as there are numbers."""
    if not any((*before, *after)):
        return x
    # PyTorch counts dimensions from the last.
    amounts = [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
    padded: Tensor = aten.constant_pad_nd.default(x, amounts, 0.0)
    return padded


def pad_or_cut(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Pad the last dimensions with zeros; a negative number cuts off as much."""
    first = x.dim() - len(before)
    for axis, (head, tail) in enumerate(zip(before, after, strict=True), first):
        if min(head, tail) < 0:
            x = x.narrow(axis, max(-head, 0), x.shape[axis] - max(-head, 0) - max(-tail, 0))
    return pad(x, [max(amount, 0) for amount in before], [max(amount, 0) for amount in after])


def geometry_of(arguments: Sequence[Any]) -> Geometry:
    """Read the geometry from the operator's arguments after its tensors."""
    stride, padding, dilation, _transposed, _output_padding, groups = arguments
    return Geometry(stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=groups)


def is_linear(kernel: Sequence[int], sizes: Sequence[int], places: Sequence[int], at: Geometry) -> bool:
    """Return whether each output position only depends on its own input position, and every input position has one."""
    return math.prod(kernel) == 1 and set(at.stride) == {1} and not any(at.padding) and list(sizes) == list(places)


def axis_bands(axis: int, kernel: int, size: int, places: int, at: Geometry, dtype: torch.dtype) -> Tensor:
    """Return (K, Q, P) along one dimension: 1 where a kernel position connects an input to an output position."""
    step = torch.arange(kernel).reshape(-1, 1, 1) * at.dilation[axis]
    output = torch.arange(places).reshape(1, 1, -1) * at.stride[axis]
    return (torch.arange(size).reshape(1, -1, 1) == step + output - at.padding[axis]).to(dtype)


def bands(
    kernel: Sequence[int], sizes: Sequence[int], places: Sequence[int], at: Geometry, dtype: torch.dtype
) -> Tensor:
    """Return (K, Q, P) over all dimensions, each flattened."""
    spans = zip(kernel, sizes, places, strict=True)
    first, *others = (axis_bands(axis, *span, at, dtype) for axis, span in enumerate(spans))
    for band in others:
        (k, q, p), (length, size, length_out) = first.shape, band.shape
        outer = first.reshape(k, 1, q, 1, p, 1) * band.reshape(1, length, 1, size, 1, length_out)
        first = outer.reshape(k * length, q * size, p * length_out)
    return first
