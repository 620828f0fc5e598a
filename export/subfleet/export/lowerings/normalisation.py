"""Group normalisation and its backward, with as few passes over the activations as the mathematics allows.

Shapes: N samples, C channels, P positions, G groups.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["NORMALISATIONS"]

aten = torch.ops.aten


def _group_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    samples, channels, positions, groups, epsilon = settings
    depth = channels // groups
    flat = inputs.reshape(samples, groups, 1, depth * positions)
    mean = flat.mean(3, keepdim=True)
    centred = flat - mean
    rstd = torch.rsqrt((centred * centred).mean(3, keepdim=True) + epsilon)
    # Weight and deviation join, so that every element is multiplied once; the bias comes last, or it would cancel.
    scale = rstd if weight is None else rstd * weight.reshape(1, groups, depth, 1)
    normalised = centred.reshape(samples, groups, depth, positions) * scale
    if bias is not None:
        normalised = normalised + bias.reshape(1, groups, depth, 1)
    return normalised.reshape(inputs.shape), mean.reshape(samples, groups), rstd.reshape(samples, groups)


def _group_norm_backward(
    gradient: Tensor, inputs: Tensor, mean_ng: Tensor, rstd_ng: Tensor, weight: Tensor | None, *settings: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    samples, channels, positions, groups, output_mask = settings
    depth = channels // groups
    shape = (samples, groups, depth, positions)
    g, rstd = gradient.reshape(shape), rstd_ng.reshape(samples, groups, 1, 1)
    centred = inputs.reshape(shape) - mean_ng.reshape(samples, groups, 1, 1)
    products, sums = (g * centred).sum(3, keepdim=True), g.sum(3, keepdim=True)
    d_input = d_weight = d_bias = None
    if output_mask[0]:
        factor = 1.0 if weight is None else weight.reshape(1, groups, depth, 1)
        product, total = ((part * factor).sum(2, keepdim=True) for part in (products, sums))
        scaled = rstd / (depth * positions)
        slope, offset = product * rstd * rstd * scaled, total * scaled
        d_input = (g * (rstd * factor) - (centred * slope + offset)).reshape(inputs.shape)
    if output_mask[1]:
        d_weight = (products * rstd).sum(0).reshape(channels)
    if output_mask[2]:
        d_bias = sums.sum(0).reshape(channels)
    return d_input, d_weight, d_bias


NORMALISATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
    }
)
