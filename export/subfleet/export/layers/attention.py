"""Attention with its own backward, and dropout that can be replayed.

Shapes: B samples, H heads, L queries, S keys, D features of a head, E features in total.
"""

# ruff: noqa: PLR0913, PLR0917 - PyTorch's signatures

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

_NEVER = -1e30
"""Added to the scores of masked pairs; finite, so that no runtime subtracts infinity from infinity."""


class _Attention(torch.autograd.Function):
    """softmax(scale * q k' + mask) v of (B, H, L, D) queries and (B, H, S, D) keys and values.

    The softmax's backward needs the sum of each row of gradient times weight. It equals the sum of output times
    gradient (Dao et al., FlashAttention, appendix B.2), which is over D elements instead of S.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, mask, dropout, scale = arguments
        scaled = query * scale
        scores = _product(scaled, key.transpose(-1, -2))
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        output = _product(weights if dropout is None else weights * dropout, value)
        ctx.save_for_backward(scaled, key, value, weights, output, dropout)
        ctx.scale, ctx.mask_shape = scale, None if mask is None else mask.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        scaled, key, value, weights, output, dropout = ctx.saved_tensors
        d_weights = _product(g, value.transpose(-1, -2))
        dropped = weights
        if dropout is not None:
            dropped, d_weights = weights * dropout, d_weights * dropout
        d_scores = weights * (d_weights - (g * output).sum(-1, keepdim=True))
        d_query = _product(d_scores, key) * ctx.scale
        d_key = _product(d_scores.transpose(-1, -2), scaled)
        d_value = _product(dropped.transpose(-1, -2), g)
        d_mask = d_scores.sum_to_size(ctx.mask_shape) if ctx.needs_input_grad[3] else None
        return d_query, d_key, d_value, d_mask, None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices over the last two dimensions."""
    *lead, rows, inner = left.shape
    product = torch.bmm(left.reshape(-1, rows, inner), right.reshape(-1, inner, right.shape[-1]))
    return product.reshape(*lead, rows, right.shape[-1])


def _causal(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return a mask (L, S) with 0 up to the diagonal and `_NEVER` after it."""
    scores = [[0.0 if column <= row else _NEVER for column in range(columns)] for row in range(rows)]
    return torch.tensor(scores, dtype=like.dtype)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a mask to one that is added; False in a boolean mask becomes `_NEVER`."""
    if mask.dtype != torch.bool:
        return mask
    return (1.0 - mask.to(like.dtype)) * _NEVER


def _dropout_factor(context: LayerContext, shape: tuple[int, ...], p: float, like: Tensor) -> Tensor | None:
    """Return the factor of each attention weight: 0 if it is dropped."""
    if p == 0:
        return None
    threshold = float(torch.tensor(p, dtype=torch.float32, device="cpu"))
    return (context.next_random(shape) >= threshold).to(like.dtype) * (1 / (1 - p))


def _scaled_dot_product(
    context: LayerContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    query, key, value = _expand_lead(query, key, value)
    shape = (*query.shape[:-1], key.shape[-2])
    mask = None if attn_mask is None else _additive(attn_mask, query)
    if is_causal:
        mask = _causal(shape[-2], shape[-1], query)
    dropout = _dropout_factor(context, shape, dropout_p, query)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    output: Tensor = _Attention.apply(query, key, value, mask, dropout, factor)  # type: ignore[no-untyped-call]
    return output


def _expand_lead(*tensors: Tensor) -> list[Tensor]:
    """Expand all dimensions but the last two alike, as where all heads of the queries share one of the keys."""
    lead = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))  # type: ignore[no-untyped-call]
    return [tensor if tensor.shape[:-2] == lead else tensor.expand(*lead, -1, -1) for tensor in tensors]


def _project(inputs_ble: Tensor, weight: Tensor, bias: Tensor | None, count: int, heads: int) -> tuple[Tensor, ...]:
    """Return `count` projections from one product, each (B, H, L, D); their gradients are concatenated at once too."""
    samples, length, _ = inputs_ble.shape
    together = functional.linear(inputs_ble, weight, bias)
    split = together.reshape(samples, length, count, heads, -1).permute(2, 0, 3, 1, 4)
    return split.unbind(0)


def _merge_masks(
    attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, query: Tensor, shape: tuple[int, int, int, int]
) -> Tensor | None:
    """Return a single additive mask for (B, H, L, S) scores, or None."""
    samples, heads, length, keys = shape
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, query)
        mask = mask.reshape(samples, heads, length, keys) if mask.dim() == 3 else mask
    elif is_causal:
        mask = _causal(length, keys, query)
    if padding is not None:
        # True, or minus infinity, excludes a key: the opposite of an attention mask.
        left_out = padding.to(query.dtype) * _NEVER if padding.dtype == torch.bool else padding.clamp(min=_NEVER)
        left_out = left_out.reshape(samples, 1, 1, keys)
        mask = left_out if mask is None else mask + left_out
    return mask


def _multi_head(
    context: LayerContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    unusual = any(extra is not None for extra in (bias_k, bias_v, static_k, static_v)) or add_zero_attn
    if unusual or query.dim() != 3:
        raise ExportError(
            f"layer {context.layer!r} attends to added keys, or to a sequence without a batch, which cannot be "
            "exported; leave out add_bias_kv and add_zero_attn, and keep the batch"
        )
    # This function always takes (L, B, E).
    query_b, key_b, value_b = (inputs.transpose(0, 1) for inputs in (query, key, value))
    length, samples, _ = query.shape
    if in_proj_weight is not None and query is key and key is value:
        q, k, v = _project(query_b, in_proj_weight, in_proj_bias, 3, num_heads)
    else:
        weights: Sequence[Any] = (q_proj_weight, k_proj_weight, v_proj_weight)
        if in_proj_weight is not None:
            weights = in_proj_weight.chunk(3)
        biases: Sequence[Any] = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (
            _project(inputs, weight, bias, 1, num_heads)[0]
            for inputs, weight, bias in zip((query_b, key_b, value_b), weights, biases, strict=True)
        )
    shape = (samples, num_heads, length, key.shape[0])
    mask = _merge_masks(attn_mask, key_padding_mask, is_causal, query, shape)
    dropout = _dropout_factor(context, shape, dropout_p if training else 0.0, query)
    factor = 1 / math.sqrt(q.shape[-1])
    heads = _Attention.apply(q, k, v, mask, dropout, factor)  # type: ignore[no-untyped-call]
    joined = heads.transpose(1, 2).reshape(samples, length, -1)
    output = functional.linear(joined, out_proj_weight, out_proj_bias).transpose(0, 1)
    return output, _weights(q, k, mask, dropout, average_attn_weights) if need_weights else None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: Tensor | None, average: bool) -> Tensor:
    """Compute the weights again for a module that reads them; dead code leaves no trace in a program."""
    scores = _product(q * (1 / math.sqrt(q.shape[-1])), k.transpose(-1, -2))
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    weights = weights if dropout is None else weights * dropout
    return weights.mean(1) if average else weights


ATTENTIONS: Mapping[Any, Replacement] = MappingProxyType(
    {
        functional.scaled_dot_product_attention: _scaled_dot_product,
        functional.multi_head_attention_forward: _multi_head,
    }
)
