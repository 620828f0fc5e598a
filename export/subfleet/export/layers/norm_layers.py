"""Batch normalisation by the statistics of the real samples only, and RMS normalisation with its own backward.

Shapes: B samples, C channels, P positions.
"""

# ruff: noqa: N803, N806, N815 - shapes in names

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.export.lowerings.norms import rms_norm, rms_norm_backward
from subfleet.protocol.errors import ExportError


class _BatchNorm(torch.autograd.Function):
    """Normalises by the statistics of the real samples: (outputs_BCP, mean_C, variance_C).

    The backward is written out, since autograd's passes over the activations three times as often. The gradient of a
    padded sample's output is 0, as no result depends on it, and so is its input's.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs_BCP, weight_C, bias_C, mask_B1, count, epsilon = arguments
        # Sum over positions first: the mask then multiplies (B, C) numbers instead of all activations.
        mean_C = (inputs_BCP.sum(2) * mask_B1).sum(0) / count
        centred = inputs_BCP - mean_C.reshape(1, -1, 1)
        variance_C = ((centred * centred).sum(2) * mask_B1).sum(0) / count
        rstd_C = torch.rsqrt(variance_C + epsilon)
        scale_1C1 = (rstd_C if weight_C is None else rstd_C * weight_C).reshape(1, -1, 1)
        mask_B11 = mask_B1.unsqueeze(2)
        # Padding becomes the bias: normalised by other samples it would grow from norm to norm until it is NaN.
        outputs = centred * (scale_1C1 * mask_B11)
        if bias_C is not None:
            outputs = outputs + bias_C.reshape(1, -1, 1)
        ctx.save_for_backward(centred, rstd_C, scale_1C1, mask_B11, count)
        ctx.has = (weight_C is not None, bias_C is not None)
        ctx.mark_non_differentiable(mean_C, variance_C)
        return outputs, mean_C, variance_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        centred, rstd_C, scale_1C1, mask_B11, count = ctx.saved_tensors
        has_weight, has_bias = ctx.has
        # Positions first, then samples: runtimes sum neighbours faster than two dimensions at once.
        sum_C = g.sum(2).sum(0)
        product_C = (g * centred).sum(2).sum(0)
        d_inputs = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            scaled_BC1 = scale_1C1 / count * mask_B11
            slope = (product_C * rstd_C * rstd_C).reshape(1, -1, 1) * scaled_BC1
            offset = sum_C.reshape(1, -1, 1) * scaled_BC1
            # Scale and offset of one tensor are a single pass if the runtime has an operator for both.
            d_inputs = (g * scale_1C1 - offset) - centred * slope
        if has_weight and ctx.needs_input_grad[1]:
            d_weight = product_C * rstd_C
        if has_bias and ctx.needs_input_grad[2]:
            d_bias = sum_C
        return d_inputs, d_weight, d_bias, None, None, None


def _batch_norm(  # noqa: PLR0913, PLR0917 - PyTorch's signature
    context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        if running_mean is None or running_var is None:
            raise ExportError(f"layer {context.layer!r} has no running statistics to normalise by; train it with some")
        mean, variance = context.buffer(running_mean), context.buffer(running_var)
        return functional.batch_norm(input, mean, variance, weight, bias, eps=eps)
    mask_B = _require_mask(context, input)
    if len(input) > len(mask_B):  # tokens in place of samples, as `flatten(0, 1)` leaves them
        tokens = input.reshape(len(mask_B), -1, *input.shape[1:]).movedim(1, 2)
        normal = _batch_norm(context, tokens, running_mean, running_var, weight, bias, training, momentum, eps)
        return normal.movedim(2, 1).reshape(input.shape)
    _check_channels(context, input, running_mean, running_var, weight, bias)
    if context.shapes_only:
        return input.clone()
    inputs_BCP = input.reshape(input.shape[0], input.shape[1], -1)
    counts = context.share((inputs_BCP.shape[2], momentum), lambda: _counts(mask_B, inputs_BCP.shape[2], momentum))
    outputs, mean_C, variance_C = _BatchNorm.apply(inputs_BCP, weight, bias, counts.mask_B1, counts.count, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        news = (mean_C, variance_C * counts.unbiased)
        for running, new, (old_rate, new_rate) in zip((running_mean, running_var), news, counts.rates, strict=True):
            context.update(running, context.buffer(running) * old_rate + new * new_rate)
    result: Tensor = outputs.reshape(input.shape)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Values that layers with the same number of positions share.

    Attributes:
        mask_B1: 1 for real samples.
        count: number of real values in a channel, at least one.
        unbiased: the factor that makes their variance unbiased.
        rates: for mean and variance, the fractions of the running value that stays and of the batch's value.
    """

    mask_B1: Tensor
    count: Tensor
    unbiased: Tensor
    rates: Sequence[tuple[Tensor, Tensor]]


def _counts(mask_B: Tensor, positions: int, momentum: float) -> _Counts:
    real = mask_B.sum(0) * positions
    rates = [momentum * known.clamp(min=0.0, max=1.0) for known in (real, real - 1.0)]
    # PyTorch's running variance is unbiased. Without a sample the running mean stays as it is, and with a single value
    # the running variance does; PyTorch refuses such a batch.
    return _Counts(
        mask_B1=mask_B.reshape(-1, 1),
        count=real.clamp(min=1.0),
        unbiased=real / (real - 1.0).clamp(min=1.0),
        rates=[(1 - rate, rate) for rate in rates],
    )


def _require_mask(context: LayerContext, inputs: Tensor) -> Tensor:
    mask_B = context.sample_mask_B
    if mask_B is None:
        raise ExportError(
            f"layer {context.layer!r} normalises by the statistics of its batch, so an inference model would give "
            "other results in another batch; give it running statistics"
        )
    if context.in_parts:
        raise ExportError(
            f"layer {context.layer!r} normalises by the statistics of its batch, so micro-batches would not give the "
            "result of the whole batch; use GroupNorm, freeze the layer with .eval(), or take the whole batch at once"
        )
    if inputs.shape[0] % mask_B.shape[0]:
        raise ExportError(
            f"layer {context.layer!r} normalises an input of the shape {tuple(inputs.shape)}, but its first size must "
            f"be a multiple of the batch's {mask_B.shape[0]}, because padding is not distinguished from samples "
            "otherwise; use LayerNorm there"
        )
    return mask_B


def _check_channels(context: LayerContext, inputs: Tensor, *given: Tensor | None) -> None:
    odd = next((tensor for tensor in given if tensor is not None and tensor.shape != inputs.shape[1:2]), None)
    if odd is not None or not inputs.is_floating_point():
        raise ExportError(
            f"layer {context.layer!r} normalises an input of {inputs.dtype} and the shape {tuple(inputs.shape)}, but "
            f"needs a floating-point input with {odd.numel() if odd is not None else 'as many'} channels"
        )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, weight, feature_dims, epsilon = arguments
        output, rrms = rms_norm(inputs, feature_dims, weight, epsilon)
        ctx.save_for_backward(inputs, weight, rrms)
        ctx.feature_dims = feature_dims
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, rrms = ctx.saved_tensors
        return *rms_norm_backward(gradients[0], inputs, ctx.feature_dims, weight, rrms), None, None


def _rms_norm(
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    output: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape), epsilon)  # type: ignore[no-untyped-call]
    return output


NORM_LAYERS: Mapping[Any, Replacement] = MappingProxyType(
    {functional.batch_norm: _batch_norm, functional.rms_norm: _rms_norm}
)
