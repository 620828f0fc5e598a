"""Convolutions and their backwards in terms of convolutions and products that a runtime computes fast.

They cover 1-D and 2-D, with stride, padding, dilation, groups, depthwise, and transposed. Constants in the modules of
the forms decide between them.

The gradient of the weights is a convolution of the input with the output's gradient as the kernel, which contracts
samples and positions. A runtime computes it as a product of matrices, as fast as the forward's if its columns are many
and contiguous in memory. So samples take the place of channels, and channels are laid out last, behind the positions:
the product has (K * C) columns, where swapping samples and channels would leave C products of K columns each (2 to 3
times slower with ONNX Runtime). The last dimension and the channels are one dimension, in which a position is as far
from the next as there are channels: a runtime then copies all that a row of the kernel sees at once. In
`benchmarks/results/train-step.md` it wins the rows "weight gradient 3x3, 64 channels 32x32", "512 channels 4x4",
"16 channels 32x32", and the table "Few channels".

Shapes: as in `convolution_geometry`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, convolve, geometry_of, is_linear, pad_or_cut
from subfleet.export.lowerings.depthwise import (
    convolve_side_by_side,
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    is_depthwise,
    is_small,
)
from subfleet.export.lowerings.few_outputs import add_kernels, count_parts, few_outputs_forward, split_rows
from subfleet.export.lowerings.few_places import (
    few_places_forward,
    few_places_input_gradient,
    few_places_weight_gradient,
    has_few_places,
)

aten = torch.ops.aten
_FEW_CHANNELS = 32
"""Up to this number a runtime's transposed convolution is faster, as it copies no patches (measured)."""


def _input_gradient(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    """Differentiate an ordinary convolution with respect to its input.

    Args:
        gradient: of the output, (N, O, *P).
        weight: (O, C / G, *K).
        sizes: of the input, S.
        at: the convolution's settings.

    Returns:
        (N, C, *S).
    """
    channels = weight.shape[1] * at.groups
    dense = set(at.stride) == {1}
    if dense and (channels > _FEW_CHANNELS or at.groups == channels):
        return _convolve_flipped_weights(gradient, weight, sizes, at)
    return _convolve_transposed(gradient, weight, sizes, at)


def _convolve_flipped_weights(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    """With stride 1, the backward is itself a convolution."""
    outputs, depth, *kernel = weight.shape
    before = [reach - padding for reach, padding in zip(at.reach(kernel), at.padding, strict=True)]
    padding = [max(amount, 0) for amount in before]
    cut = [min(amount, 0) for amount in before]
    flipped_cok = _flip(weight.reshape(at.groups, outputs // at.groups, depth, *kernel))
    x = pad_or_cut(gradient, cut, cut)
    if is_depthwise(flipped_cok, at.groups):
        d_input = convolve_side_by_side(x, flipped_cok, sizes, replace(at, padding=tuple(padding)))
        if d_input is not None:
            return d_input
    return convolve(x, flipped_cok, padding=padding, dilation=at.dilation, groups=at.groups)


def _flip(w_gock: Tensor) -> Tensor:
    """Convert (G, O / G, C / G, *K) to (C, O / G, *K), with the kernel reversed.

    Two transpositions around a copy of whole rows are faster than reversing K in place.
    """
    groups, outputs, depth, *kernel = w_gock.shape
    flat = w_gock.reshape(groups, outputs, -1)
    places = flat.shape[2] // depth
    if places == 1:
        return w_gock.transpose(1, 2).reshape(groups * depth, outputs, *kernel)
    turned = flat.transpose(1, 2).reshape(groups * depth, places, outputs)
    flipped = turned.index_select(1, torch.arange(places - 1, -1, -1))
    return flipped.transpose(1, 2).reshape(groups * depth, outputs, *kernel)


def _convolve_transposed(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    # What the forward left out at the far edge becomes output padding.
    seen = at.measure_extent(weight.shape[2:], gradient.shape[2:])
    rest = [size + 2 * padding - part for size, padding, part in zip(sizes, at.padding, seen, strict=True)]
    settings = (list(at.stride), list(at.padding), list(at.dilation), True, rest, at.groups)
    d_input: Tensor = aten.convolution.default(gradient, weight, None, *settings)
    return d_input


_SLOWER_SUM = 4
"""How many times longer an element of a sum of products takes than one that is moved (measured)."""


def _weight_gradient(inputs: Tensor, gradient: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Differentiate an ordinary convolution with respect to its weights.

    Args:
        inputs: (N, C, *S).
        gradient: of the output, (N, O, *P).
        kernel: the sizes K.
        at: the convolution's settings.

    Returns:
        (O, C / G, *K).
    """
    if at.groups == 1 and is_linear(kernel, inputs.shape[2:], gradient.shape[2:], at):
        return _pointwise_gradient(inputs, gradient).reshape(gradient.shape[1], inputs.shape[1], *kernel)
    (_, outputs, *places), depth = gradient.shape, inputs.shape[1] // at.groups
    parts = count_parts(outputs, kernel, places, at)
    if parts == 1:
        d_okc = _contract(inputs, gradient.transpose(0, 1), kernel, at)
    else:
        longer = [kernel[0] + parts - 1, kernel[1]]
        d_each = _contract(inputs, split_rows(gradient, parts), longer, replace(at, stride=(parts, 1)))
        d_okc = add_kernels(d_each.reshape(outputs, parts, longer[0], -1), kernel[0])
    return d_okc.reshape(outputs, -1, depth).transpose(1, 2).reshape(outputs, depth, *kernel)


def _contract(inputs: Tensor, g_onp: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Sum over samples and positions; returns (1, O, *K, C / G), whose last two dimensions may be one."""
    (samples, channels, *sizes), places = inputs.shape, g_onp.shape[2:]
    dims, depth = len(sizes), channels // at.groups
    if at.groups == 1:
        x_nsc = inputs.permute(0, *range(2, 2 + dims), 1)
    else:
        x_nsc = inputs.reshape(samples, at.groups, depth, *sizes).permute(1, 0, *range(3, 3 + dims), 2)
    # At the far edge the forward may leave out some positions, or the padding.
    ends = zip(at.measure_extent(kernel, places), sizes, at.padding, strict=True)
    after = [seen - size - padding for seen, size, padding in ends]
    x = pad_or_cut(x_nsc.reshape(1, at.groups * samples, *sizes, depth), [*at.padding, 0], [*after, 0])
    # The forward's stride spreads the gradient, so it becomes the dilation, and vice versa.
    if at.dilation[-1] == 1:
        spread = [*at.stride[:-1], at.stride[-1] * depth]
        return convolve(x.flatten(-2), g_onp, stride=at.dilation, dilation=spread, groups=at.groups)
    # Kernel positions that are apart leave gaps in a row.
    stride, spread = [*at.dilation, 1], [*at.stride, 1]
    return convolve(x, g_onp.unsqueeze(-1), stride=stride, dilation=spread, groups=at.groups)


def _pointwise_gradient(inputs: Tensor, gradient: Tensor) -> Tensor:
    """Compute (O, C) for a kernel of size 1."""
    x_ncp, g_nop = inputs.flatten(2), gradient.flatten(2)
    samples, channels, places = x_ncp.shape
    outputs = g_nop.shape[1]
    if places * (channels + outputs) < _SLOWER_SUM * channels * outputs:
        # Moving samples next to positions costs less than summing one product for each sample.
        x_cp, g_op = (part.transpose(0, 1).reshape(-1, samples * places) for part in (x_ncp, g_nop))
        return g_op @ x_cp.t()
    return (g_nop @ x_ncp.transpose(1, 2)).sum(0)


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _forward(inputs: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Any:
    transposed = arguments[3]
    at = geometry_of(arguments)
    sizes, kernel = inputs.shape[2:], weight.shape[2:]
    if transposed:
        return NotImplemented
    spans = zip(sizes, at.padding, at.reach(kernel), at.stride, strict=True)
    places = [(size + 2 * padding - reach - 1) // stride + 1 for size, padding, reach, stride in spans]
    output = None
    if is_depthwise(weight, at.groups):
        output = depthwise_forward(inputs, weight, places, at)
    elif has_few_places(sizes, places, at):
        output = few_places_forward(inputs, weight, places, at)
    elif (parts := count_parts(len(weight), kernel, places, at, forward=True)) > 1:
        return few_outputs_forward(inputs, weight, bias, parts, at)
    if output is None:
        return NotImplemented
    # Strides of another memory format would lead PyTorch's next layer down another path.
    output = output.contiguous()
    return output if bias is None else output + bias.reshape(1, -1, *[1] * len(places))


def _backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias_sizes: list[int] | None, *arguments: Any
) -> _Gradients:
    *settings, output_mask = arguments
    at, transposed = geometry_of(settings), settings[3]
    differentiate = _transposed_gradients if transposed else _ordinary_gradients
    d_input, d_weight = differentiate(gradient, inputs, weight, at, output_mask)
    d_bias = gradient.flatten(2).sum((0, 2)) if output_mask[2] else None
    return None if d_input is None else d_input.contiguous(), d_weight, d_bias


def _forms(
    sizes: Sequence[int], places: Sequence[int], weight: Tensor, at: Geometry
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Choose the functions of the input's and the weights' gradients for an ordinary convolution."""
    if is_depthwise(weight, at.groups):
        small = is_small(weight.shape[2:], sizes, places)
        return depthwise_input_gradient if small else _input_gradient, depthwise_weight_gradient
    to_input = few_places_input_gradient if has_few_places(sizes, places, at, back=True) else _input_gradient
    return to_input, few_places_weight_gradient if has_few_places(sizes, places, at) else _weight_gradient


def _ordinary_gradients(
    gradient: Tensor, inputs: Tensor, weight: Tensor, at: Geometry, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    sizes, kernel = inputs.shape[2:], weight.shape[2:]
    to_input, to_weight = _forms(sizes, gradient.shape[2:], weight, at)
    d_input = to_input(gradient, weight, sizes, at) if output_mask[0] else None
    d_weight = to_weight(inputs, gradient, kernel, at) if output_mask[1] else None
    return d_input, d_weight


def _transposed_gradients(
    gradient: Tensor, inputs: Tensor, weight: Tensor, at: Geometry, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """A transposed convolution is the backward of an ordinary one, so its own backward is that one's forward."""
    sizes, kernel = inputs.shape[2:], weight.shape[2:]
    d_input = d_weight = None
    if output_mask[0]:
        full = convolve(gradient, weight, stride=at.stride, padding=at.padding, dilation=at.dilation, groups=at.groups)
        # Output padding larger than the stride adds positions that meet no input.
        for axis, size in enumerate(sizes, 2):
            full = full if full.shape[axis] == size else full.narrow(axis, 0, size)
        d_input = full
    if output_mask[1]:
        _, to_weight = _forms(gradient.shape[2:], sizes, weight, at)
        d_weight = to_weight(gradient, inputs, kernel, at)
    return d_input, d_weight


CONVOLUTIONS_AS_CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution.default: _forward, aten.convolution_backward.default: _backward}
)
