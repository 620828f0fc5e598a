"""Layer normalisation, root mean square normalisation, and their backwards, with few passes over the activations.

Shapes: R rows that are normalised one by one, F features of a row.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYER_NORMS", "LAYER_NORM_BACKWARD", "rms_norm", "rms_norm_backward"]

aten = torch.ops.aten


def _rows(x: Tensor, feature_dims: int) -> Tensor:
    """(..., *features) to (R, F)."""
    return x.reshape(-1, math.prod(x.shape[x.dim() - feature_dims :]))


def _layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + epsilon)
    output = centred * rstd
    if weight is not None:
        output = output * weight
    return output if bias is None else output + bias, mean, rstd


def _row_means(x_rf: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over a row of what the weight scales, (R, 1): one product where there is a weight."""
    if weight is None:
        return x_rf.mean(1, keepdim=True)
    return torch.mm(x_rf, (weight * (1 / x_rf.shape[1])).reshape(-1, 1))


def _scale_features(x_rf: Tensor, weight: Tensor | None) -> Tensor:
    return x_rf if weight is None else x_rf * weight.reshape(1, -1)


def _layer_norm_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    gradient: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    _bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = len(normalized_shape)
    g_rf, rstd_r1 = _rows(gradient, dims), rstd.reshape(-1, 1)
    normalised_rf = (_rows(x, dims) - mean.reshape(-1, 1)) * rstd_r1
    products_rf = g_rf * normalised_rf
    d_input = d_weight = d_bias = None
    if output_mask[0]:
        offset, slope = _row_means(g_rf, weight), _row_means(products_rf, weight)
        d_input = ((_scale_features(g_rf, weight) - (normalised_rf * slope + offset)) * rstd_r1).reshape(x.shape)
    if output_mask[1] and weight is not None:
        d_weight = products_rf.sum(0).reshape(normalized_shape)
    if output_mask[2]:
        d_bias = g_rf.sum(0).reshape(normalized_shape)
    return d_input, d_weight, d_bias


def rms_norm(x: Tensor, feature_dims: int, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Each row divided by its root mean square (Zhang and Sennrich, Root mean square layer normalization, section 4).

    Args:
        x: (..., *features).
        feature_dims: how many trailing dimensions make up a row.
        weight: of the features' shape, or None.
        epsilon: added to the mean square.

    Returns:
        The output, and one over the root mean square, which keeps the dimensions of `x`.
    """
    dims = list(range(x.dim() - feature_dims, x.dim()))
    rrms = torch.rsqrt((x * x).mean(dims, keepdim=True) + epsilon)
    output = x * rrms
    return output if weight is None else output * weight, rrms


def rms_norm_backward(
    gradient: Tensor, x: Tensor, feature_dims: int, weight: Tensor | None, rrms: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm` with respect to its input and its weight."""
    g_rf, rrms_r1 = _rows(gradient, feature_dims), rrms.reshape(-1, 1)
    normalised_rf = _rows(x, feature_dims) * rrms_r1
    products_rf = g_rf * normalised_rf
    d_input = (_scale_features(g_rf, weight) - normalised_rf * _row_means(products_rf, weight)) * rrms_r1
    d_weight = None if weight is None else products_rf.sum(0).reshape(weight.shape)
    return d_input.reshape(x.shape), d_weight


LAYER_NORM_BACKWARD: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.native_layer_norm_backward.default: _layer_norm_backward}
)
LAYER_NORMS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.native_layer_norm.default: _layer_norm, **LAYER_NORM_BACKWARD}
)
