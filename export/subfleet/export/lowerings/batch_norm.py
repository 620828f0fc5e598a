"""Batch normalisation by given or by batch statistics, without a sample mask: eval mode and instance normalisation.

Shapes: N samples, C channels, P positions. Training mode with a sample mask is a layer of its own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

__all__ = ["BATCH_NORMS"]

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
    """One factor and one offset for each channel: two passes."""
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


BATCH_NORMS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.native_batch_norm.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, _training, _momentum, epsilon: (  # noqa: SLF001
            _normalise_by_batch(x, weight, bias, epsilon)
        ),
        aten._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, variance, momentum, epsilon: (  # noqa: SLF001
            _batch_norm(x, weight, bias, mean, variance, False, momentum, epsilon)
        ),
        aten.native_batch_norm_backward.default: _batch_norm_backward,
    }
)
