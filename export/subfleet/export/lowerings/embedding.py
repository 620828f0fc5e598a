"""Embeddings' backwards.

Shapes: V rows of the table (the vocabulary), D features of a row, T tokens.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

__all__ = ["EMBEDDINGS"]

aten = torch.ops.aten


def _embedding_backward(
    gradient: Tensor, tokens: Tensor, vocabulary: int, padding_index: int, scale_by_frequency: bool
) -> Tensor:
    """Add each token's gradient to its row of the table."""
    if scale_by_frequency:
        raise ExportError("an embedding has scale_grad_by_freq, which cannot be lowered; leave that option off")
    g_td, tokens_t = gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1)
    if 0 <= padding_index < vocabulary:
        g_td = g_td * (tokens_t != padding_index).to(g_td.dtype).reshape(-1, 1)
    zeros_vd = torch.zeros((vocabulary, g_td.shape[1]), dtype=g_td.dtype)
    added: Tensor = aten.index_put.default(zeros_vd, [tokens_t], g_td, True)
    return added


EMBEDDINGS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.embedding_dense_backward.default: _embedding_backward}
)
