"""Convolutions and their backwards: as other convolutions, and as matrix products for runtimes with slow ones.

Shapes: N samples, C channels in, O channels out, H and W sizes, K and L kernel sizes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

__all__ = ["CONVOLUTIONS_AS_CONVOLUTIONS", "CONVOLUTIONS_AS_PRODUCTS"]

aten = torch.ops.aten


def _refuse(name: str, *, transposed: bool, groups: int, dimensions: int) -> None:
    if transposed or groups != 1 or dimensions != 2:
        raise ExportError(
            f"{name} with transposed={transposed}, groups={groups} and {dimensions} dimensions cannot be lowered; "
            "use an ordinary 2-D convolution with one group"
        )


def _backward_as_convolutions(  # noqa: PLR0913 - the operator's own signature
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    _bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,  # noqa: FBT001 - the operator's own signature
    _output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _refuse("convolution_backward", transposed=transposed, groups=groups, dimensions=inputs.dim() - 2)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        # What the forward left over at the far edge comes back as output padding.
        rest = [
            inputs.shape[2 + i]
            - ((gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1)
            for i in range(2)
        ]
        d_input = aten.convolution(gradient, weight, None, stride, padding, dilation, True, rest, 1)  # noqa: FBT003
    if wanted[1]:
        # Samples and channels change places; the forward's stride spreads the gradient, so it becomes the dilation.
        swapped = aten.convolution(
            inputs.transpose(0, 1),
            gradient.transpose(0, 1),
            None,
            dilation,
            padding,
            stride,
            False,
            [0, 0],
            1,  # noqa: FBT003
        )
        d_weight = swapped[:, :, : weight.shape[2], : weight.shape[3]].transpose(0, 1)
    if wanted[2]:
        d_bias = gradient.sum((0, 2, 3))
    return d_input, d_weight, d_bias


def _columns(
    x_nchw: Tensor, kernel: tuple[int, int], stride: list[int], dilation: list[int], *, samples_first: bool
) -> Tensor:
    """Every patch of a padded input as a column (C*K*L, N*H*W), or as a row (N*H*W, C*K*L) where samples come first.

    One strided copy: no slice for each place of the kernel, so the graph stays small, and no transposition later.
    """
    samples, channels, height, width = x_nchw.shape
    out_height = (height - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    out_width = (width - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    patch = ((channels, height * width), (kernel[0], dilation[0] * width), (kernel[1], dilation[1]))
    place = ((samples, channels * height * width), (out_height, stride[0] * width), (out_width, stride[1]))
    dims = (*place, *patch) if samples_first else (*patch, *place)
    copied = aten.as_strided_copy.default(x_nchw, [size for size, _ in dims], [step for _, step in dims], 0)
    count = samples * out_height * out_width
    return copied.reshape((count, -1) if samples_first else (-1, count))


def _pad(x_nchw: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Zeros around the last two dimensions."""
    return aten.constant_pad_nd.default(x_nchw, [*columns, *rows], 0.0) if any((*rows, *columns)) else x_nchw


def _channels_first(x_nopp: Tensor) -> Tensor:
    """(N, O, H, W) to (O, N*H*W)."""
    return x_nopp.transpose(0, 1).reshape(x_nopp.shape[1], -1)


def _convolve(
    x_nchw: Tensor, rows_ok: Tensor, kernel: tuple[int, int], stride: list[int], dilation: list[int]
) -> Tensor:
    """Convolve a padded input with the weights (O, C*K*L) of a kernel."""
    samples, out_channels = x_nchw.shape[0], rows_ok.shape[0]
    sizes = [(x_nchw.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    product = torch.mm(rows_ok, _columns(x_nchw, kernel, stride, dilation, samples_first=False))
    return product.reshape(out_channels, samples, *sizes).transpose(0, 1).contiguous()


def _as_products(  # noqa: PLR0913 - the operator's own signature
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,  # noqa: FBT001 - the operator's own signature
    _output_padding: list[int],
    groups: int,
) -> Tensor:
    _refuse("convolution", transposed=transposed, groups=groups, dimensions=inputs.dim() - 2)
    x = _pad(inputs, (padding[0], padding[0]), (padding[1], padding[1]))
    kernel = (weight.shape[2], weight.shape[3])
    output = _convolve(x, weight.reshape(weight.shape[0], -1), kernel, stride, dilation)
    return output if bias is None else output + bias.reshape(1, -1, 1, 1)


def _backward_as_products(  # noqa: PLR0913 - the operator's own signature
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    _bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,  # noqa: FBT001 - the operator's own signature
    _output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _refuse("convolution_backward", transposed=transposed, groups=groups, dimensions=inputs.dim() - 2)
    kernel = (weight.shape[2], weight.shape[3])
    d_input = d_weight = d_bias = None
    if wanted[0]:
        d_input = _input_gradient(gradient, weight, (inputs.shape[2], inputs.shape[3]), stride, padding, dilation)
    if wanted[1]:
        x = _pad(inputs, (padding[0], padding[0]), (padding[1], padding[1]))
        rows = _columns(x, kernel, stride, dilation, samples_first=True)
        d_weight = torch.mm(_channels_first(gradient), rows).reshape(weight.shape)
    if wanted[2]:
        d_bias = gradient.sum((0, 2, 3))
    return d_input, d_weight, d_bias


def _spread(g_nohw: Tensor, stride: list[int]) -> Tensor:
    """Put stride - 1 zeros after each element: (N, O, H, W) to (N, O, H * stride, W * stride)."""
    samples, channels, height, width = g_nohw.shape
    if stride == [1, 1]:
        return g_nohw
    apart = g_nohw.reshape(samples, channels, height, 1, width, 1)
    spread = aten.constant_pad_nd.default(apart, [0, stride[1] - 1, 0, 0, 0, stride[0] - 1], 0.0)
    return spread.reshape(samples, channels, height * stride[0], width * stride[1])


def _input_gradient(
    gradient: Tensor, weight: Tensor, sizes: tuple[int, int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The forward with flipped weights, over the gradient with the zeros that the forward's stride left out."""
    spread = _spread(gradient, stride)
    reach = [dilation[i] * (weight.shape[2 + i] - 1) for i in range(2)]
    before = [reach[i] - padding[i] for i in range(2)]
    if min(before) < 0:
        raise ExportError(f"padding {padding} is larger than the kernel's reach {reach}; use a smaller padding")
    # The input is as long as the output says, give or take the stride; what is too much is zeros, and cut off.
    wanted = [sizes[i] + reach[i] for i in range(2)]
    after = [max(wanted[i] - before[i] - spread.shape[2 + i], 0) for i in range(2)]
    padded = _pad(spread, (before[0], after[0]), (before[1], after[1]))
    if list(padded.shape[2:]) != wanted:
        padded = padded[:, :, : wanted[0], : wanted[1]].contiguous()
    kernel = (weight.shape[2], weight.shape[3])
    flipped = weight.flip(2, 3) if kernel != (1, 1) else weight
    return _convolve(padded, _channels_first(flipped), kernel, [1, 1], dilation)


CONVOLUTIONS_AS_CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution_backward.default: _backward_as_convolutions}
)
CONVOLUTIONS_AS_PRODUCTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution.default: _as_products, aten.convolution_backward.default: _backward_as_products}
)
