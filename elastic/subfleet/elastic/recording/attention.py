"""Multi-head attention as separate calls, whose number of heads and width can be cut."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from subfleet.protocol.errors import ConfigError

_QUERIES_KEYS_VALUES = 3


def attend(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute `torch.nn.functional.multi_head_attention_forward` of (length, batch, width) without its weights.

    Raises:
        ConfigError: a rarely used option is set.
    """
    del embed_dim_to_check, need_weights, others
    if bias_k is not None or bias_v is not None or add_zero_attn or key_padding_mask is not None:
        raise ConfigError("a layer of attention has bias_k, add_zero_attn or key_padding_mask, which is not supported")
    if use_separate_proj_weight or in_proj_weight is None:
        raise ConfigError("a layer of attention has kdim or vdim, which is not supported; project before the layer")
    length, batch = query.shape[:2]
    width = in_proj_weight.shape[0] // _QUERIES_KEYS_VALUES
    if query is key and key is value:
        projected = functional.linear(query, in_proj_weight, in_proj_bias)
        whole = projected.view(length, batch, _QUERIES_KEYS_VALUES, num_heads, width // num_heads)
        parts = [whole[:, :, part] for part in range(_QUERIES_KEYS_VALUES)]
    else:
        weights = in_proj_weight.chunk(_QUERIES_KEYS_VALUES)
        biases = in_proj_bias.chunk(_QUERIES_KEYS_VALUES) if in_proj_bias is not None else [None] * 3
        parts = [
            functional.linear(own, weight, bias).view(own.shape[0], batch, num_heads, width // num_heads)
            for own, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
    queries, keys, values = (part.permute(1, 2, 0, 3) for part in parts)
    if attn_mask is not None and attn_mask.dim() == _QUERIES_KEYS_VALUES:
        attn_mask = attn_mask.view(batch, num_heads, *attn_mask.shape[1:])
    heads = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=attn_mask, dropout_p=dropout_p if training else 0.0
    )
    joined = heads.permute(2, 0, 1, 3).reshape(length, batch, out_proj_weight.shape[1])
    return functional.linear(joined, out_proj_weight, out_proj_bias), None
