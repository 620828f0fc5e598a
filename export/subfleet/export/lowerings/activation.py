"""Activations, softmax and their backwards in closed form, with few passes over the activations.

A backward repeats what its forward computed (a sigmoid, an error function) in the same terms; every target merges such
repeated expressions, so it is computed once.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS"]

aten = torch.ops.aten

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
