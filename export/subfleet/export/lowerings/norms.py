"""Batch, layer, RMS, group and weight normalisation and their backwards, with few passes over the activations.

Shapes: N samples, C channels, P positions, G groups; R rows that are normalised separately, F features of a row.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


def _per_channel(values_c: Tensor, x: Tensor) -> Tensor:
    return values_c.reshape(1, -1, *([1] * (x.dim() - 2)))


def _other_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _scale(rstd_c: Tensor, weight: Tensor | None) -> Tensor:
    return rstd_c if weight is None else rstd_c * weight


def _normalise_by_given(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, epsilon: float
) -> Tensor:
    """Apply one factor and one offset for each channel: two passes."""
    scale = _scale(torch.rsqrt(variance + epsilon), weight)
    offset = -mean * scale if bias is None else bias - mean * scale
    return x * _per_channel(scale, x) + _per_channel(offset, x)


def _normalise_by_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = _other_dims(x)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + epsilon)
    output = centred * (rstd if weight is None else rstd * _per_channel(weight, x))
    output = output if bias is None else output + _per_channel(bias, x)
    return output, mean.reshape(-1), rstd.reshape(-1)


def _batch_norm(  # noqa: PLR0913, PLR0917 - the operator's signature
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    training: bool,
    _momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not training and running_mean is not None and running_variance is not None:
        output = _normalise_by_given(x, weight, bias, running_mean, running_variance, epsilon)
        return output, x.new_zeros(0), x.new_zeros(0)
    if running_mean is not None:
        raise ExportError(
            "a normalisation changes its running statistics inside an operator; use the batch_norm of "
            "torch.nn.functional, or track_running_stats=False"
        )
    return _normalise_by_batch(x, weight, bias, epsilon)


def _batch_norm_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    training: bool,
    epsilon: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    mean, rstd = (saved_mean, saved_rstd) if training else (running_mean, None)
    if rstd is None and running_variance is not None:
        rstd = torch.rsqrt(running_variance + epsilon)
    if mean is None or rstd is None:
        raise ExportError("a normalisation's backward lacks its statistics; report it with the request")
    dims = _other_dims(x)
    d_input = d_weight = d_bias = None
    scale = _per_channel(_scale(rstd, weight), x)
    if not training and not output_mask[1]:
        return gradient * scale if output_mask[0] else None, None, gradient.sum(dims) if output_mask[2] else None
    centred = x - _per_channel(mean, x)
    products, sums = (gradient * centred).sum(dims), gradient.sum(dims)
    if output_mask[0]:
        d_input = gradient
        if training:
            count = x.numel() // x.shape[1]
            slope, offset = products * rstd * rstd * (1 / count), sums * (1 / count)
            d_input = gradient - (centred * _per_channel(slope, x) + _per_channel(offset, x))
        d_input = d_input * scale
    if output_mask[1]:
        d_weight = products * rstd
    if output_mask[2]:
        d_bias = sums
    return d_input, d_weight, d_bias


def _rows(x: Tensor, feature_dims: int) -> Tensor:
    """Reshape (..., *features) to (R, F)."""
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
    """Return the mean of each weighted row, (R, 1): a single product if there is a weight."""
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
    """Divide each row by its root mean square (Zhang and Sennrich, Root mean square layer normalization, section 4).

    Args:
        x: (..., *features).
        feature_dims: number of trailing dimensions that make up a row.
        weight: in the features' shape, or None.
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
    """Return the gradients of `rms_norm` with respect to its input and its weight."""
    g_rf, rrms_r1 = _rows(gradient, feature_dims), rrms.reshape(-1, 1)
    normalised_rf = _rows(x, feature_dims) * rrms_r1
    products_rf = g_rf * normalised_rf
    d_input = (_scale_features(g_rf, weight) - normalised_rf * _row_means(products_rf, weight)) * rrms_r1
    d_weight = None if weight is None else products_rf.sum(0).reshape(weight.shape)
    return d_input.reshape(x.shape), d_weight


def _group_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    samples, channels, positions, groups, epsilon = settings
    depth = channels // groups
    flat = inputs.reshape(samples, groups, 1, depth * positions)
    mean = flat.mean(3, keepdim=True)
    centred = flat - mean
    rstd = torch.rsqrt((centred * centred).mean(3, keepdim=True) + epsilon)
    # Weight and deviation are combined, so every element is multiplied once; the bias comes last, or it would cancel.
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


def _sum_other_dims(x: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions except one."""
    return x.sum([axis for axis in range(x.dim()) if axis != dim], keepdim=True)


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = torch.sqrt(_sum_other_dims(direction * direction, dim))
    return direction * (length / norms), norms


def _weight_norm_backward(
    gradient: Tensor, direction: Tensor, length: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    norms = norms.reshape(length.shape)
    along = _sum_other_dims(gradient * direction, dim) / norms
    d_direction = (gradient - direction * (along / norms)) * (length / norms)
    return d_direction, along


NORMS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.native_batch_norm.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, _training, _momentum, epsilon: (  # noqa: SLF001
            _normalise_by_batch(x, weight, bias, epsilon)
        ),
        aten._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, variance, momentum, epsilon: (  # noqa: SLF001
            _batch_norm(x, weight, bias, mean, variance, False, momentum, epsilon)
        ),
        aten.native_batch_norm_backward.default: _batch_norm_backward,
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten._weight_norm_interface.default: _weight_norm,  # noqa: SLF001 - the operator's name
        aten._weight_norm_interface_backward.default: _weight_norm_backward,  # noqa: SLF001 - the operator's name
    }
)
