"""Weight normalisation and its backward (Salimans and Kingma 2016, equations 2 and 3).

A weight is a direction times a length for each index of one dimension.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["WEIGHT_NORMS"]

aten = torch.ops.aten


def _sum_other_dims(x: Tensor, dim: int) -> Tensor:
    """Over all dimensions but one."""
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


WEIGHT_NORMS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten._weight_norm_interface.default: _weight_norm,  # noqa: SLF001 - the operator's name
        aten._weight_norm_interface_backward.default: _weight_norm_backward,  # noqa: SLF001 - the operator's name
    }
)
