"""Convolutions and their backwards as matrix products, for runtimes whose own convolutions are slow.

Shapes: N samples, C channels in, O channels out, H and W sizes, K and L kernel sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

__all__ = ["CONVOLUTIONS_AS_PRODUCTS"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Where a 2-D kernel meets its input; each a pair for rows and columns."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]

    def output_size(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Of a kernel over an already padded input."""
        return [(sizes[i] - self.dilation[i] * (kernel[i] - 1) - 1) // self.stride[i] + 1 for i in range(2)]

    def reach(self, kernel: Sequence[int]) -> list[int]:
        """How far a kernel's last place lies from its first."""
        return [self.dilation[i] * (kernel[i] - 1) for i in range(2)]


def _geometry(inputs: Tensor, arguments: Sequence[Any]) -> _Geometry:
    """Read the operator's arguments after its tensors; refuse what is not lowered."""
    stride, padding, dilation, transposed, _output_padding, groups = arguments
    if transposed or groups != 1 or inputs.dim() != 4:
        raise ExportError(
            f"a convolution with transposed={transposed}, groups={groups} and {inputs.dim() - 2} dimensions cannot be "
            "lowered; use an ordinary 2-D convolution with one group"
        )
    return _Geometry(stride=list(stride), padding=list(padding), dilation=list(dilation))


def _columns(x_nchw: Tensor, kernel: Sequence[int], at: _Geometry, *, samples_first: bool) -> Tensor:
    """Every patch of a padded input as a column (C*K*L, N*H*W), or as a row (N*H*W, C*K*L) where samples come first.

    One strided copy: no slice for each place of the kernel, so the graph stays small, and no transposition later.
    """
    samples, channels, height, width = x_nchw.shape
    out_height, out_width = at.output_size((height, width), kernel)
    patch = ((channels, height * width), (kernel[0], at.dilation[0] * width), (kernel[1], at.dilation[1]))
    place = ((samples, channels * height * width), (out_height, at.stride[0] * width), (out_width, at.stride[1]))
    dims = (*place, *patch) if samples_first else (*patch, *place)
    copied: Tensor = aten.as_strided_copy.default(x_nchw, [size for size, _ in dims], [step for _, step in dims], 0)
    count = samples * out_height * out_width
    return copied.reshape((count, -1) if samples_first else (-1, count))


def _pad(x_nchw: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Zeros around the last two dimensions."""
    if not any((*rows, *columns)):
        return x_nchw
    padded: Tensor = aten.constant_pad_nd.default(x_nchw, [*columns, *rows], 0.0)
    return padded


def _channels_first(x_nopp: Tensor) -> Tensor:
    """(N, O, H, W) to (O, N*H*W)."""
    return x_nopp.transpose(0, 1).reshape(x_nopp.shape[1], -1)


def _convolve(x_nchw: Tensor, rows_ok: Tensor, kernel: Sequence[int], at: _Geometry) -> Tensor:
    """Convolve a padded input with the weights (O, C*K*L) of a kernel."""
    samples, out_channels = x_nchw.shape[0], rows_ok.shape[0]
    product = torch.mm(rows_ok, _columns(x_nchw, kernel, at, samples_first=False))
    output = product.reshape(out_channels, samples, *at.output_size(x_nchw.shape[2:], kernel))
    return output.transpose(0, 1).contiguous()


def _pad_evenly(inputs: Tensor, at: _Geometry) -> Tensor:
    return _pad(inputs, (at.padding[0], at.padding[0]), (at.padding[1], at.padding[1]))


def _as_products(inputs: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    at = _geometry(inputs, arguments)
    output = _convolve(_pad_evenly(inputs, at), weight.reshape(weight.shape[0], -1), weight.shape[2:], at)
    return output if bias is None else output + bias.reshape(1, -1, 1, 1)


def _backward_as_products(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias_sizes: list[int] | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *settings, wanted = arguments
    at = _geometry(inputs, settings)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        d_input = _input_gradient(gradient, weight, inputs.shape[2:], at)
    if wanted[1]:
        rows = _columns(_pad_evenly(inputs, at), weight.shape[2:], at, samples_first=True)
        d_weight = torch.mm(_channels_first(gradient), rows).reshape(weight.shape)
    if wanted[2]:
        d_bias = gradient.sum((0, 2, 3))
    return d_input, d_weight, d_bias


def _spread(g_nohw: Tensor, stride: Sequence[int]) -> Tensor:
    """Put stride - 1 zeros after each element: (N, O, H, W) to (N, O, H * stride, W * stride)."""
    samples, channels, height, width = g_nohw.shape
    if tuple(stride) == (1, 1):
        return g_nohw
    apart = g_nohw.reshape(samples, channels, height, 1, width, 1)
    spread = aten.constant_pad_nd.default(apart, [0, stride[1] - 1, 0, 0, 0, stride[0] - 1], 0.0)
    wide: Tensor = spread.reshape(samples, channels, height * stride[0], width * stride[1])
    return wide


def _input_gradient(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: _Geometry) -> Tensor:
    """The forward with flipped weights, over the gradient with the zeros that the forward's stride left out."""
    kernel = weight.shape[2:]
    reach = at.reach(kernel)
    before = [reach[i] - at.padding[i] for i in range(2)]
    if min(before) < 0:
        raise ExportError(f"padding {at.padding} is larger than the kernel's reach {reach}; use a smaller padding")
    spread = _spread(gradient, at.stride)
    # What the stride spread beyond the input's size is zeros; they are cut off again.
    wanted = [sizes[i] + reach[i] for i in range(2)]
    after = [max(wanted[i] - before[i] - spread.shape[2 + i], 0) for i in range(2)]
    padded = _pad(spread, (before[0], after[0]), (before[1], after[1]))
    if list(padded.shape[2:]) != wanted:
        padded = padded[:, :, : wanted[0], : wanted[1]].contiguous()
    flipped = weight.flip(2, 3) if tuple(kernel) != (1, 1) else weight
    dense = _Geometry(stride=[1, 1], padding=[0, 0], dilation=at.dilation)
    return _convolve(padded, _channels_first(flipped), kernel, dense)


CONVOLUTIONS_AS_PRODUCTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution.default: _as_products, aten.convolution_backward.default: _backward_as_products}
)
