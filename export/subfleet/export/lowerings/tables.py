"""The tables of lowerings that every target starts from."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from subfleet.export.lowerings.arithmetic import ACTIVATIONS, ARITHMETIC
from subfleet.export.lowerings.indexing import INDEXING
from subfleet.export.lowerings.norms import NORMS
from subfleet.export.lowerings.pooling import AVERAGE_POOLS, MAXIMUM_POOLS
from subfleet.export.lowerings.separable import RESAMPLINGS
from subfleet.export.lowerings.shaping import SHAPING
from subfleet.export.lowerings.unfolding import UNFOLDINGS

aten = torch.ops.aten

_BY_PYTORCH = (
    aten.elu, aten.elu_backward, aten.celu, aten.selu, aten.softplus, aten.softplus_backward, aten.mish,
    aten.mish_backward, aten.glu, aten.glu_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward,
    aten.hardshrink, aten.softshrink, aten._prelu_kernel, aten._prelu_kernel_backward,  # noqa: SLF001
    aten.lerp.Scalar, aten.lerp.Tensor, aten.sinc.default, aten.logit.default, aten.logit_backward.default,
    aten.threshold.default, aten.norm.ScalarOpt_dim, aten.vdot.default, aten.frac.default, aten.xlogy.Tensor,
    aten.logaddexp.default, aten.rot90.default, aten.heaviside.default,
)  # fmt: skip
"""Rare operators with decompositions of PyTorch's own."""


def _truncate(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.floor(torch.abs(x))


def _fmod(x: Tensor, divisor: Tensor | float) -> Tensor:
    return x - _truncate(x / divisor) * divisor


def _remainder(x: Tensor, divisor: Tensor | float) -> Tensor:
    return x - torch.floor(x / divisor) * divisor


def _trilinear(  # noqa: PLR0913, PLR0917 - the operator's arguments
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    _unroll_dim: int = 1,
) -> Tensor:
    parts = []
    for tensor, dims in ((first, expand_first), (second, expand_second), (third, expand_third)):
        part = tensor
        for dim in dims:
            part = part.unsqueeze(dim)
        parts.append(part)
    product = parts[0] * parts[1] * parts[2]
    return product.sum(list(summed)) if summed else product


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Select the diagonal from the elements of both dimensions, flattened."""
    rows, columns = x.shape[dim1], x.shape[dim2]
    moved = torch.movedim(x, (dim1, dim2), (-2, -1))
    flat = moved.reshape(*moved.shape[:-2], rows * columns)
    return flat @ _diagonal_matrix(rows, columns, offset).t()


def _diagonal_backward(gradient: Tensor, shape: Sequence[int], offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = shape[dim1], shape[dim2]
    flat = gradient @ _diagonal_matrix(rows, columns, offset)
    moved = flat.reshape(*flat.shape[:-1], rows, columns)
    return torch.movedim(moved, (-2, -1), (dim1, dim2))


def _diagonal_matrix(rows: int, columns: int, offset: int) -> Tensor:
    """Return (positions on the diagonal, rows * columns), with 1 at each position."""
    first = max(-offset, 0), max(offset, 0)
    count = max(min(rows - first[0], columns - first[1]), 0)
    positions = [(first[0] + position) * columns + first[1] + position for position in range(count)]
    chosen = [[1.0 if column == position else 0.0 for column in range(rows * columns)] for position in positions]
    return torch.tensor(chosen, dtype=torch.float32).reshape(count, rows * columns)


def _bucketize(x: Tensor, bounds: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Count the bounds below each number."""
    below = bounds <= x.unsqueeze(-1) if right else bounds < x.unsqueeze(-1)
    return below.to(torch.int32 if out_int32 else torch.int64).sum(-1)


def _clamp(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    raised = x if low is None else torch.maximum(x, low)
    return raised if high is None else torch.minimum(raised, high)


COMMON: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **get_decompositions(_BY_PYTORCH),
        aten.hypot.default: lambda x, y: torch.sqrt(x * x + y * y),
        aten.sinh.default: lambda x: (torch.exp(x) - torch.exp(-x)) * 0.5,
        aten.cosh.default: lambda x: (torch.exp(x) + torch.exp(-x)) * 0.5,
        aten.asinh.default: lambda x: torch.sign(x) * torch.log(torch.abs(x) + torch.sqrt(x * x + 1.0)),
        aten.acosh.default: lambda x: torch.log(x + torch.sqrt(x * x - 1.0)),
        aten.atanh.default: lambda x: torch.log((1.0 + x) / (1.0 - x)) * 0.5,
        aten.tan.default: lambda x: torch.sin(x) / torch.cos(x),
        aten.clamp_min.Tensor: torch.maximum,
        aten.clamp_max.Tensor: torch.minimum,
        aten.clamp.Tensor: lambda x, low=None, high=None: _clamp(x, low, high),
        aten.fmod.Scalar: _fmod,
        aten.fmod.Tensor: _fmod,
        aten.remainder.Scalar: _remainder,
        aten.remainder.Tensor: _remainder,
        aten.trunc.default: _truncate,
        aten._trilinear.default: _trilinear,  # noqa: SLF001 - the operator's name
        aten.diagonal.default: _diagonal,
        aten.diagonal_backward.default: _diagonal_backward,
        aten.bucketize.Tensor: _bucketize,
        **ACTIVATIONS,
        **ARITHMETIC,
        **AVERAGE_POOLS,
        **INDEXING,
        **MAXIMUM_POOLS,
        **NORMS,
        **RESAMPLINGS,
        **SHAPING,
        **UNFOLDINGS,
    }
)
"""For every target. A target adds its convolutions, and leaves out operators that its runtime has."""


def remove_operators(table: Mapping[Any, Callable[..., Any]], *operators: Any) -> Mapping[Any, Callable[..., Any]]:
    """Return a table without some operators."""
    return MappingProxyType({operator: lowering for operator, lowering in table.items() if operator not in operators})
