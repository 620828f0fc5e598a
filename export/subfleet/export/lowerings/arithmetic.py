"""Powers, reductions, activations, softmax and their backwards, with few passes over the activations.

A backward repeats what its forward computed (a sigmoid, an error function) in the same terms; every target merges such
repeated expressions, so it is computed once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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


_CUBIC = 0.044715
"""A constant of GELU's approximation by tanh (Hendrycks and Gimpel, Gaussian error linear units, section 2)."""


_STEEPEST = 1e38
"""A slope that takes every normal float to 1 or more."""

_STEEP = 2.0**22
"""A slope so steep that neighbouring floats around a bound give 0 and 1; a power of two rounds nothing."""


def _step(x: Tensor, bound: float = 0.0, *, sign: int = 1) -> Tensor:
    """Return 1 where x is above the bound, or with sign -1 below it, and 0 elsewhere.

    A ramp is one fast pass of a runtime; its `sign` or `where` takes several passes, or 10 times as long (measured).
    """
    if bound == 0.0:
        return torch.clamp(x * (sign * _STEEPEST), 0.0, 1.0)
    return torch.clamp(x * (sign * _STEEP) + bound * (-sign * _STEEP), 0.0, 1.0)


def _threshold_backward(gradient: Tensor, output: Tensor, threshold: float) -> Tensor:
    if threshold:
        return torch.where(output > threshold, gradient, 0.0)
    return gradient * _step(output)


def _hardtanh_backward(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    return gradient * (_step(x, low) * _step(x, high, sign=-1))


def _inside(x: Tensor, reach: float) -> Tensor:
    """Return 1 where |x| is below `reach`, and 0 elsewhere."""
    return _step(x, -reach) * _step(x, reach, sign=-1)


def _hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient * (_inside(x, 3.0) * (1 / 6))


def _hardswish(x: Tensor) -> Tensor:
    return x * functional.hardsigmoid(x)


def _hardswish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient * (functional.hardsigmoid(x) + x * (_inside(x, 3.0) * (1 / 6)))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return gradient * (sigmoid + (x * sigmoid) * (1.0 - sigmoid))


def _normal_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard normal distribution function of x, and x divided by the root of 2."""
    scaled = x * (1 / math.sqrt(2.0))
    return torch.erf(scaled) * 0.5 + 0.5, scaled


def _gelu_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sigmoid in place of the tanh, 0.5 + 0.5 * tanh(u) = sigmoid(2 u), and the square of x."""
    square = x * x
    factor = 2.0 * math.sqrt(2.0 / math.pi)
    return torch.sigmoid(x * (square * (factor * _CUBIC) + factor)), square


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return x * (_normal_cdf(x)[0] if approximate == "none" else _gelu_slopes(x)[0])


def _gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        cdf, scaled = _normal_cdf(x)
        return gradient * (cdf + scaled * torch.exp(-(scaled * scaled)) * (1 / math.sqrt(math.pi)))
    sigmoid, square = _gelu_slopes(x)
    factor = 2.0 * math.sqrt(2.0 / math.pi)
    slope = square * (3.0 * factor * _CUBIC) + factor
    return gradient * (sigmoid + (x * sigmoid) * (1.0 - sigmoid) * slope)


def _leaky_relu_backward(gradient: Tensor, x: Tensor, slope: float, _is_result: bool) -> Tensor:
    return torch.where(x > 0, gradient, gradient * slope)


def _shrink_backward(gradient: Tensor, x: Tensor, reach: float) -> Tensor:
    """The backward of both shrinking functions: they pass what is above `reach`, the soft one moved towards 0."""
    return torch.where(torch.abs(x) > reach, gradient, torch.zeros((), dtype=gradient.dtype))


def _softmax_backward(gradient: Tensor, output: Tensor, dim: int, _dtype: torch.dtype) -> Tensor:
    product = gradient * output
    return product - output * product.sum(dim, keepdim=True)


def _log_softmax_backward(gradient: Tensor, output: Tensor, dim: int, _dtype: torch.dtype) -> Tensor:
    return gradient - torch.exp(output) * gradient.sum(dim, keepdim=True)


ACTIVATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.threshold_backward.default: _threshold_backward,
        aten.hardtanh.default: lambda x, low=-1.0, high=1.0: torch.clamp(x, low, high),
        aten.hardtanh_backward.default: _hardtanh_backward,
        aten.hardsigmoid.default: lambda x: torch.clamp(x * (1 / 6) + 0.5, 0.0, 1.0),
        aten.hardsigmoid_backward.default: _hardsigmoid_backward,
        aten.hardswish.default: _hardswish,
        aten.hardswish_backward.default: _hardswish_backward,
        aten.silu.default: _silu,
        aten.silu_backward.default: _silu_backward,
        aten.gelu.default: _gelu,
        aten.gelu_backward.default: _gelu_backward,
        aten.sigmoid_backward.default: lambda gradient, output: gradient * (output * (1.0 - output)),
        aten.tanh_backward.default: lambda gradient, output: gradient * (1.0 - output * output),
        aten.leaky_relu_backward.default: _leaky_relu_backward,
        aten.hardshrink_backward.default: _shrink_backward,
        aten.softshrink_backward.default: _shrink_backward,
        aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001 - the operator's name
        aten._log_softmax_backward_data.default: _log_softmax_backward,  # noqa: SLF001 - the operator's name
    }
)
