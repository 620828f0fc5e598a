"""Powers, reductions and small compound operators in terms that every target has."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ARITHMETIC"]

aten = torch.ops.aten


def _power(x: Tensor, exponent: float) -> Any:
    """Compute the common exponents without a logarithm."""
    simple: Mapping[float, Callable[[Tensor], Tensor]] = {
        1: lambda x: x.clone(),
        2: lambda x: x * x,
        3: lambda x: x * x * x,
        0.5: torch.sqrt,
        -0.5: torch.rsqrt,
        -1: torch.reciprocal,
        -2: lambda x: torch.reciprocal(x * x),
    }
    if exponent == 0:
        return torch.full(tuple(x.shape), 1.0, dtype=x.dtype)
    return simple[exponent](x) if exponent in simple else NotImplemented


def _all_dims(x: Tensor, dims: Sequence[int] | int | None) -> list[int]:
    if isinstance(dims, int):
        return [dims]
    return list(dims) if dims else list(range(x.dim()))


def _variance(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    all_dims = _all_dims(x, dims)
    count = math.prod(x.shape[dim] for dim in all_dims)
    centred = x - x.mean(all_dims, keepdim=True)
    divisor = max(count - (1 if correction is None else correction), 0)
    return (centred * centred).sum(all_dims, keepdim=keepdim) / divisor


def _variance_and_mean(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(x, dims, correction=correction, keepdim=keepdim), x.mean(_all_dims(x, dims), keepdim=keepdim)


def _norm(x: Tensor, order: float = 2, dims: Any = None, keepdim: bool = False, **_options: object) -> Tensor:
    all_dims = _all_dims(x, dims)
    if order == 2:
        return torch.sqrt((x * x).sum(all_dims, keepdim=keepdim))
    if order == 1:
        return torch.abs(x).sum(all_dims, keepdim=keepdim)
    if order == math.inf:
        return torch.amax(torch.abs(x), all_dims, keepdim=keepdim)
    return (torch.abs(x) ** order).sum(all_dims, keepdim=keepdim) ** (1.0 / order)


def _log_sum_exp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    highest = torch.amax(x, dims, keepdim=True)
    total = torch.log(torch.exp(x - highest).sum(dims, keepdim=True)) + highest
    return total if keepdim else total.squeeze(tuple(dims))


def _extreme(x: Tensor, dim: int, keepdim: bool = False, *, by: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    return by[0](x, dim, keepdim=keepdim), by[1](x, dim, keepdim=keepdim)


def _add_combined(
    x: Tensor, left: Tensor, right: Tensor, *, value: float = 1, combine: Callable[..., Tensor]
) -> Tensor:
    combined = combine(left, right)
    return x + (combined if value == 1 else combined * value)


def _add_batch_product(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(left, right)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


def _log1p(x: Tensor) -> Tensor:
    """Compute log(1 + x), exact near 0 too: what x + 1 rounds away is put back as a factor (Kahan)."""
    shifted = x + 1.0
    exact = shifted - 1.0
    safe = torch.where(exact == 0, torch.ones((), dtype=x.dtype), exact)
    return torch.where(exact == 0, x, torch.log(shifted) * (x / safe))


def _expm1(x: Tensor) -> Tensor:
    """Compute exp(x) - 1 = tanh(x / 2) * (exp(x) + 1), exact near 0 too."""
    return torch.tanh(x * 0.5) * (torch.exp(x) + 1.0)


ARITHMETIC: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.pow.Tensor_Scalar: _power,
        aten.var.correction: _variance,
        aten.std.correction: lambda x, dims=None, **options: torch.sqrt(_variance(x, dims, **options)),
        aten.var_mean.correction: _variance_and_mean,
        aten.linalg_vector_norm.default: _norm,
        aten.logsumexp.default: _log_sum_exp,
        aten.max.dim: partial(_extreme, by=(torch.amax, torch.argmax)),
        aten.min.dim: partial(_extreme, by=(torch.amin, torch.argmin)),
        aten.sum.default: lambda x, **options: aten.sum.dim_IntList(x, list(range(x.dim())), **options),
        aten.mean.default: lambda x, **options: aten.mean.dim(x, list(range(x.dim())), **options),
        aten.clamp_min.default: aten.clamp.default,
        aten.clamp_max.default: lambda x, high: aten.clamp.default(x, None, high),
        aten.max.default: torch.amax,
        aten.min.default: torch.amin,
        aten.addcmul.default: partial(_add_combined, combine=torch.mul),
        aten.addcdiv.default: partial(_add_combined, combine=torch.div),
        aten.baddbmm.default: _add_batch_product,
        aten.mv.default: lambda matrix, vector: torch.mm(matrix, vector.reshape(-1, 1)).reshape(-1),
        aten.dot.default: lambda left, right: (left * right).sum(0),
        aten.log1p.default: _log1p,
        aten.expm1.default: _expm1,
        aten.isnan.default: lambda x: x != x,  # noqa: PLR0124 - true of NaN alone
        aten.sgn.default: torch.sign,
        aten.square.default: lambda x: x * x,
    }
)
