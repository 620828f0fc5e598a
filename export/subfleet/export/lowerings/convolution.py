"""Convolutions and their backwards in terms of convolutions and products that a runtime computes fast.

All of them are lowered: 1-D and 2-D, with stride, padding, dilation, groups, depthwise, and transposed.
The rules that choose between forms are constants in the modules of these forms.

Shapes: as in `convolution_geometry`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, convolve, geometry_of
from subfleet.export.lowerings.depthwise import (
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    is_depthwise,
    is_small,
)
from subfleet.export.lowerings.few_places import (
    few_places_forward,
    few_places_input_gradient,
    few_places_weight_gradient,
    has_few_places,
)
from subfleet.export.lowerings.input_gradient import input_gradient
from subfleet.export.lowerings.weight_gradient import weight_gradient

__all__ = ["CONVOLUTIONS_AS_CONVOLUTIONS"]

aten = torch.ops.aten
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
    if output is None:
        return NotImplemented
    # Strides of another memory format would lead PyTorch's next layer another way.
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
    """The functions of the input's and the weights' gradients that suit an ordinary convolution."""
    if is_depthwise(weight, at.groups):
        small = is_small(weight.shape[2:], sizes, places)
        return depthwise_input_gradient if small else input_gradient, depthwise_weight_gradient
    to_input = few_places_input_gradient if has_few_places(sizes, places, at, back=True) else input_gradient
    return to_input, few_places_weight_gradient if has_few_places(sizes, places, at) else weight_gradient


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
        # More output padding than the stride adds places that meet no input.
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
