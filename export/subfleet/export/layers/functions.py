"""PyTorch functions with an operator that no runtime has, computed by operators that every runtime has."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError


def _make_pool(function: Any, dims: int) -> Replacement:
    def pool(
        _context: LayerContext,
        input: Tensor,  # noqa: A002 - PyTorch's name of it
        output_size: int | Sequence[int | None] | None,
    ) -> Tensor:
        sizes = output_size if isinstance(output_size, Sequence) else [output_size] * dims
        if any(size != 1 for size in sizes) or input.dim() <= dims:
            pooled: Tensor = function(input, output_size)
            return pooled
        return input.mean(dim=tuple(range(-dims, 0)), keepdim=True)

    return pool


def _pad(
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    if mode != "circular" or min(pad) < 0:
        return functional.pad(input, list(pad), mode, value)
    for axis_from_last in range(len(pad) // 2):
        dim, (before, after) = input.dim() - 1 - axis_from_last, pad[2 * axis_from_last : 2 * axis_from_last + 2]
        size = input.shape[dim]
        parts = [input.narrow(dim, size - before, before), input, input.narrow(dim, 0, after)]
        input = torch.cat([part for part in parts if part.shape[dim]], dim)  # noqa: A001 - the result so far
    return input


_MOST_FACTORS = 64
"""The longest product, which becomes as many operators."""


def _embedding_bag(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
    context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum or average the embeddings of bags of one length."""
    if offsets is not None or max_norm is not None or scale_grad_by_freq or mode == "max" or input.dim() != 2:
        raise ExportError(
            f"layer {context.layer!r} is an embedding bag with offsets, max_norm, scale_grad_by_freq or the mode "
            "'max', which no program has; give it (batch, length) indices of bags of one length, and the mode 'sum' "
            "or 'mean'"
        )
    rows = functional.embedding(input, weight, padding_idx)
    counted = torch.ones_like(input, dtype=weight.dtype)
    if padding_idx is not None:
        counted = counted * (input != padding_idx).to(weight.dtype)
        rows = rows * counted.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    total = rows.sum(1)
    return total if mode == "sum" else total / counted.sum(1, keepdim=True).clamp(min=1.0)


def _local_response_norm(
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Tensor:
    """Compute the mean of squares over neighbouring channels as a sum of shifted tensors."""
    squares = input * input
    before, behind = size // 2, (size - 1) // 2
    padded = functional.pad(squares, (*[0, 0] * (input.dim() - 2), before, behind))
    channels = input.shape[1]
    total = padded[:, :channels]
    for shift in range(1, size):
        total = total + padded[:, shift : shift + channels]
    return input / (total * (alpha / size) + k) ** beta


def _cdist(_context: LayerContext, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1)
    return distances


def _product(_context: LayerContext, input: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002 - PyTorch's name
    given = dict(zip(("dim", "keepdim"), args, strict=False)) | options
    dim = given.get("dim")
    factors = input.reshape(-1) if dim is None else input
    at = 0 if dim is None else dim
    if factors.shape[at] > _MOST_FACTORS:
        whole: Tensor = torch.prod(input, *args, **options)
        return whole
    product = _cumulative_products(factors, at)[-1]
    return product.unsqueeze(at) if given.get("keepdim") else product


def _products(_context: LayerContext, input: Tensor, dim: int, **options: Any) -> Tensor:  # noqa: A002 - PyTorch's name
    if input.shape[dim] > _MOST_FACTORS:
        whole: Tensor = torch.cumprod(input, dim, **options)
        return whole
    return torch.stack(_cumulative_products(input, dim), dim)


def _cumulative_products(factors: Tensor, dim: int) -> list[Tensor]:
    """Return the first factor, the product of the first two, of the first three, and so on."""
    products: list[Tensor] = []
    for factor in factors.unbind(dim):
        products.append(factor if not products else products[-1] * factor)
    return products


FUNCTIONS: Mapping[Any, Replacement] = MappingProxyType(
    {
        functional.adaptive_avg_pool1d: _make_pool(functional.adaptive_avg_pool1d, 1),
        functional.adaptive_avg_pool2d: _make_pool(functional.adaptive_avg_pool2d, 2),
        functional.adaptive_avg_pool3d: _make_pool(functional.adaptive_avg_pool3d, 3),
        functional.pad: _pad,
        functional.embedding_bag: _embedding_bag,
        functional.local_response_norm: _local_response_norm,
        torch.cdist: _cdist,
        torch.prod: _product,
        Tensor.prod: _product,
        torch.cumprod: _products,
        Tensor.cumprod: _products,
    }
)
"""By function."""
