"""Batch normalisation whose statistics are those of the real samples alone.

Shapes: B samples, C channels, P positions.
"""

# ruff: noqa: N803, N806 - shapes in names

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

__all__ = ["BATCH_NORMS"]


class _BatchNorm(torch.autograd.Function):
    """Normalise by the statistics of the real samples: (outputs_BCP, mean_C, variance_C, count).

    The backward is written out, since what autograd makes of the forward passes over the activations three times as
    often. The gradient of a padded sample's output is 0, as nothing that counts depends on it; so is then its input's.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs_BCP, weight_C, bias_C, mask_B, epsilon = arguments
        mask_11B = mask_B.reshape(1, 1, -1)
        real = mask_B.sum(0) * inputs_BCP.shape[2]
        count = real.clamp(min=1.0)
        # Sums over positions first: the mask then meets (B, C) numbers and not every activation.
        mean_C = _over_samples(inputs_BCP.sum(2), mask_11B) / count
        centred = inputs_BCP - mean_C.reshape(1, -1, 1)
        variance_C = _over_samples((centred * centred).sum(2), mask_11B) / count
        rstd_C = torch.rsqrt(variance_C + epsilon)
        scale_C = rstd_C if weight_C is None else rstd_C * weight_C
        # Padding leaves as the bias: normalised by others it would grow from norm to norm, until it is no number.
        outputs = centred * (scale_C.reshape(1, -1) * mask_B.reshape(-1, 1)).unsqueeze(2)
        if bias_C is not None:
            outputs = outputs + bias_C.reshape(1, -1, 1)
        ctx.save_for_backward(centred, rstd_C, scale_C, mask_B, count)
        ctx.has = (weight_C is not None, bias_C is not None)
        ctx.mark_non_differentiable(mean_C, variance_C, real)
        return outputs, mean_C, variance_C, real

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        centred, rstd_C, scale_C, mask_B, count = ctx.saved_tensors
        has_weight, has_bias = ctx.has
        # Positions first, then samples: runtimes add up neighbours faster than two dimensions at once.
        sum_C = g.sum(2).sum(0)
        product_C = (g * centred).sum(2).sum(0)
        d_inputs = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            mask_B11 = mask_B.reshape(-1, 1, 1)
            scaled_C = scale_C / count
            slope = (product_C * rstd_C * rstd_C * scaled_C).reshape(1, -1, 1) * mask_B11
            offset = (sum_C * scaled_C).reshape(1, -1, 1) * mask_B11
            # Scaling and offset of one tensor together are a single pass where a runtime has an operator for them.
            d_inputs = (g * scale_C.reshape(1, -1, 1) - offset) - centred * slope
        if has_weight and ctx.needs_input_grad[1]:
            d_weight = product_C * rstd_C
        if has_bias and ctx.needs_input_grad[2]:
            d_bias = sum_C
        return d_inputs, d_weight, d_bias, None, None


def _over_samples(values_BC: Tensor, mask_11B: Tensor) -> Tensor:
    """The sum over the real samples, (C,)."""
    return (values_BC * mask_11B.reshape(-1, 1)).sum(0)


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
    mask_B = _checked_mask(context, input)
    inputs_BCP = input.reshape(input.shape[0], input.shape[1], -1)
    outputs, mean_C, variance_C, count = _BatchNorm.apply(inputs_BCP, weight, bias, mask_B, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        # PyTorch's running variance is the unbiased one. No sample teaches nothing of the mean, and one value alone
        # nothing of the variance: PyTorch refuses such a batch, here the running variance stays as it is.
        unbiased_C = variance_C * (count / (count - 1.0).clamp(min=1.0))
        for running, new, known in ((running_mean, mean_C, count), (running_var, unbiased_C, count - 1.0)):
            old, rate = context.buffer(running), momentum * known.clamp(min=0.0, max=1.0)
            context.update(running, old * (1 - rate) + new * rate)
    result: Tensor = outputs.reshape(input.shape)
    return result


def _checked_mask(context: LayerContext, inputs: Tensor) -> Tensor:
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
    if inputs.shape[0] != mask_B.shape[0]:
        raise ExportError(
            f"layer {context.layer!r} normalises an input of the shape {tuple(inputs.shape)}, but its first size must "
            f"be the batch's {mask_B.shape[0]}, or padding could not be told from samples; use LayerNorm there"
        )
    return mask_B


BATCH_NORMS: Mapping[Any, Replacement] = MappingProxyType({functional.batch_norm: _batch_norm})
