"""Activations, softmax and their backwards in terms that every target has."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ACTIVATIONS"]

aten = torch.ops.aten


def _threshold_backward(gradient: Tensor, output: Tensor, threshold: float) -> Tensor:
    if threshold:
        return torch.where(output > threshold, gradient, 0.0)
    # The backward of ReLU, whose output is never below 0. A runtime's `where` may hold two more tensors of this size.
    return gradient * torch.sign(output)


def _log_softmax_backward(gradient: Tensor, output: Tensor, dim: int, _dtype: torch.dtype) -> Tensor:
    return gradient - torch.exp(output) * gradient.sum(dim, keepdim=True)


def _ones_like(tensor: Tensor, **_kwargs: object) -> Tensor:
    return torch.full(tuple(tensor.shape), 1.0, dtype=tensor.dtype)


ACTIVATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.threshold_backward.default: _threshold_backward,
        aten._log_softmax_backward_data.default: _log_softmax_backward,  # noqa: SLF001 - the operator's name
        aten.ones_like.default: _ones_like,
    }
)
