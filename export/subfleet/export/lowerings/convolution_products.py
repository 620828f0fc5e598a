"""Convolutions and their backwards as matrix products, for runtimes without convolutions with variable weights.

They cover one and two dimensions, with stride, padding, dilation and groups, depthwise, and transposed. Everything is
computed with channels last; the transpositions around it cancel where convolutions follow one another.

Shapes: N samples, C channels in, O channels out, H and W sizes, K and L kernel sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings import taps, winograd
from subfleet.export.lowerings.taps import Taps
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


def _pair(values: Sequence[int], only: int) -> tuple[int, int]:
    """Return values for rows and columns; a one-dimensional convolution has a single row."""
    return (int(values[0]), int(values[1])) if len(values) == 2 else (only, int(values[0]))


def _taps(weight: Tensor, settings: Sequence[Any]) -> tuple[Taps, bool, tuple[int, int]]:
    """Return the geometry, whether the convolution is transposed, and its output padding."""
    stride, padding, dilation, transposed, output_padding, groups = settings
    if weight.dim() not in {3, 4}:
        raise ExportError(
            f"a convolution in {weight.dim() - 2} dimensions cannot be lowered; use one in one or two dimensions"
        )
    at = Taps(
        kernel=_pair(weight.shape[2:], 1),
        stride=_pair(stride, 1),
        padding=_pair(padding, 0),
        dilation=_pair(dilation, 1),
        groups=groups,
    )
    return at, bool(transposed), _pair(output_padding, 0)


def _nhwc(x: Tensor) -> Tensor:
    """Convert (N, C, H, W) or (N, C, W) to (N, H, W, C)."""
    return (x if x.dim() == 4 else x.unsqueeze(2)).permute(0, 2, 3, 1)


def _to_nchw(x_nhwc: Tensor, dims: int) -> Tensor:
    """Convert back to (N, C, H, W) or (N, C, W), contiguous, as a module's own reshapes may expect."""
    x = x_nhwc.permute(0, 3, 1, 2)
    return (x if dims == 4 else x.squeeze(2)).contiguous()


def _algorithm(at: Taps, weight: Tensor, sizes: Sequence[int], samples: int) -> ModuleType:
    """Choose the module that computes with weights, for these sizes of what it gathers, or of an output's gradient."""
    return winograd if winograd.fits(at, weight.shape[1], weight.shape[0], sizes, samples) else taps


def _square(weight: Tensor) -> Tensor:
    """Return weights with two kernel dimensions."""
    return weight if weight.dim() == 4 else weight.unsqueeze(2)


def _convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    at, transposed, beyond = _taps(weight, settings)
    x, w = _nhwc(inputs), _square(weight)
    sizes: Sequence[int] = at.output_size(x.shape[1:3])
    if transposed:
        sizes = [
            (x.shape[1 + i] - 1) * at.stride[i]
            - 2 * at.padding[i]
            + at.dilation[i] * (at.kernel[i] - 1)
            + 1
            + beyond[i]
            for i in range(2)
        ]
        output = _algorithm(at, w, sizes, len(x)).spread(x, w, at, sizes)
    else:
        output = _algorithm(at, w, sizes, len(x)).gather(x, w, at, sizes)
    return _to_nchw(output if bias is None else output + bias, inputs.dim())


def _convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias_sizes: list[int] | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *settings, output_mask = arguments
    at, transposed, _ = _taps(weight, settings)
    x, g, w = _nhwc(inputs), _nhwc(gradient), _square(weight)
    d_input = d_weight = d_bias = None
    if output_mask[0]:
        algorithm = _algorithm(at, w, x.shape[1:3], len(g))
        apply = algorithm.gather if transposed else algorithm.spread
        d_input = _to_nchw(apply(g, w, at, x.shape[1:3]), inputs.dim())
    if output_mask[1]:
        read, made = (g, x) if transposed else (x, g)
        d_weight = _algorithm(at, w, made.shape[1:3], len(g)).weight_gradient(read, made, at).reshape(weight.shape)
    if output_mask[2]:
        d_bias = g.sum((0, 1, 2))
    return d_input, d_weight, d_bias


def _product_with_bias(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() == 1 and beta == alpha == 1:
        return NotImplemented  # type: ignore[no-any-return]  # the operator stays
    product = torch.mm(a, b)
    return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


PRODUCTS_WITH_BIAS: Mapping[Any, Callable[..., Any]] = MappingProxyType({aten.addmm.default: _product_with_bias})
"""A product with a bias for each column is one operator of XNNPACK; others are a product and a sum."""
CONVOLUTIONS_AS_PRODUCTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution.default: _convolution, aten.convolution_backward.default: _convolution_backward}
)
