"""PyTorch's basic operators as nodes of XNNPACK's graph."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.nodes import argument, shape_of
from subfleet.export.targets.xnnpack.graph import Rule, XnnpackGraph, is_floating
from subfleet.export.targets.xnnpack.reductions import REDUCTIONS

aten = torch.ops.aten

_LARGEST_CONSTANT = 1 << 16
"""Elements of the largest constant that is written into the program; the runtime creates larger ones."""


def product_by_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply (..., M, K) by (..., N, K) transposed: a separate operator, for graphs that are written for XNNPACK."""
    return a @ b.mT


def part(x: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Cut a box out of a tensor: slices of several dimensions in a single copy."""
    return x[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def _unary(kind: str, graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.unary(kind, graph.value(argument(node, 0)))


def _binary(kind: str, graph: XnnpackGraph, node: fx.Node) -> int:
    second = graph.value(argument(node, 1))
    alpha: Any = argument(node, 2, "alpha", 1)
    return graph.binary(kind, graph.value(argument(node, 0)), graph.scale(second, float(alpha)))


def _divide(graph: XnnpackGraph, node: fx.Node) -> int:
    first, second = argument(node, 0), argument(node, 1)
    if isinstance(second, fx.Node):
        return graph.binary("Div", graph.value(first), graph.value(second))
    return graph.scale(graph.value(first), 1.0 / float(second))


def _clamp(graph: XnnpackGraph, node: fx.Node) -> int:
    low: Any = argument(node, 1, "min")
    high: Any = argument(node, 2, "max")
    limits = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    return graph.unary("Clamp", graph.value(argument(node, 0)), limits=limits)


def _relu(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.unary("Clamp", graph.value(argument(node, 0)), limits=(0.0, math.inf))


HUGE = 1e38
"""Multiplied by this, everything except 0 exceeds 1; numbers below 1e-38 are not normal."""


def _sign(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.unary("Clamp", graph.scale(graph.value(argument(node, 0)), HUGE), limits=(-1.0, 1.0))


def _silu(graph: XnnpackGraph, node: fx.Node) -> int:
    x = graph.value(argument(node, 0))
    return graph.binary("Multiply", x, graph.unary("Sigmoid", x))


def _subtract_from(graph: XnnpackGraph, node: fx.Node) -> int:
    alpha: Any = argument(node, 2, "alpha", 1)
    subtracted = graph.scale(graph.value(argument(node, 0)), float(alpha))
    return graph.binary("Subtract", graph.value(argument(node, 1)), subtracted)


def _reciprocal(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.binary("Div", graph.constant(1.0), graph.value(argument(node, 0)))


def _power(graph: XnnpackGraph, node: fx.Node) -> int:
    x = graph.value(argument(node, 0))
    squared = graph.unary("Square", x)
    return squared if argument(node, 1) == 2 else graph.binary("Multiply", squared, x)


def _erf(graph: XnnpackGraph, node: fx.Node) -> int:
    """Compute erf from the GELU, x times the normal distribution function: twice that function, minus one."""
    # So small that it only changes 0, which cannot be a divisor.
    x = graph.binary("Add", graph.scale(graph.value(argument(node, 0)), math.sqrt(2)), graph.constant(1e-30))
    distribution = graph.binary("Div", graph.unary("Gelu", x), x)
    return graph.binary("Subtract", graph.scale(distribution, 2.0), graph.constant(1.0))


def _product(graph: XnnpackGraph, node: fx.Node, *, transpose_b: bool = False) -> int:
    a, b = graph.value(argument(node, 0)), graph.value(argument(node, 1))
    return graph.product(a, b, transpose_b=transpose_b)


def _linear(graph: XnnpackGraph, node: fx.Node) -> int:
    bias, x, weight = (graph.value(argument) for argument in node.args[:3])
    return graph.linear(x, weight, bias)


def _reshape(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.reshape(graph.value(argument(node, 0)), shape_of(node))


def _permute(graph: XnnpackGraph, node: fx.Node) -> int:
    dims: Any = argument(node, 1)
    return graph.transpose(graph.value(argument(node, 0)), [dim % len(dims) for dim in dims])


def _expand(graph: XnnpackGraph, node: fx.Node) -> int:
    source: Any = argument(node, 0)
    wide = shape_of(node)
    own = (*[1] * (len(wide) - len(shape_of(source))), *shape_of(source))
    repeated = [size if held == 1 else 1 for size, held in zip(wide, own, strict=True)]
    value = graph.reshape(graph.value(source), own)
    return graph.binary("Multiply", value, graph.constant(1.0, repeated))


def _part(graph: XnnpackGraph, node: fx.Node) -> int:
    offsets, sizes = argument(node, 1), argument(node, 2)
    return graph.slice(graph.value(argument(node, 0)), offsets, sizes)


def _concatenate(graph: XnnpackGraph, node: fx.Node) -> int:
    parts: Any = argument(node, 0)
    axis: Any = argument(node, 1, "dim", 0)
    return graph.concatenate([graph.value(part) for part in parts], axis % len(shape_of(node)))


def _pad(graph: XnnpackGraph, node: fx.Node) -> int:
    source: Any = argument(node, 0)
    flat: Any = argument(node, 1)
    sizes = shape_of(source)
    before, after = [0] * len(sizes), [0] * len(sizes)
    for index in range(len(flat) // 2):
        before[-1 - index], after[-1 - index] = flat[2 * index], flat[2 * index + 1]
    value = graph.value(source)
    if min(*before, *after) < 0:
        offsets = [max(-low, 0) for low in before]
        sizes_kept = [size + min(low, 0) + min(high, 0) for low, size, high in zip(before, sizes, after, strict=True)]
        value = graph.slice(value, offsets, sizes_kept)
    fill: Any = argument(node, 2, "value", 0.0)
    low, high = [max(size, 0) for size in before], [max(size, 0) for size in after]
    return graph.pad(value, low, high, float(fill)) if any((*low, *high)) else value


def _fill(graph: XnnpackGraph, node: fx.Node) -> int:
    number: Any = argument(node, 1) if node.target is aten.full.default else 0.0
    if node.target is aten.scalar_tensor.default:
        number = argument(node, 0)
    return graph.constant(float(number), shape_of(node) or (1,))


def _is_small(node: fx.Node) -> bool:
    return math.prod(shape_of(node)) <= _LARGEST_CONSTANT


def _is_last_dim(node: fx.Node) -> bool:
    rank = len(shape_of(node))
    return rank > 0 and argument(node, 1) in {-1, rank - 1} and not argument(node, 2)


def _has_dims(node: fx.Node) -> bool:
    return len(node.args) > 1 and bool(argument(node, 1)) and not node.kwargs.get("dtype")


def _has_one_dim(node: fx.Node) -> bool:
    return _has_dims(node) and len(argument(node, 1)) == 1


def _is_plain_addmm(node: fx.Node) -> bool:
    bias: Any = argument(node, 0)
    return not node.kwargs and len(node.args) == 3 and len(shape_of(bias)) == 1


def _same(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.value(argument(node, 0))


OPERATORS: Mapping[Any, Rule] = MappingProxyType(
    {
        **REDUCTIONS,
        **{
            target: partial(_unary, kind)
            for target, kind in (
                (aten.abs.default, "Abs"),
                (aten.ceil.default, "Ceiling"),
                (aten.cos.default, "Cos"),
                (aten.exp.default, "Exp"),
                (aten.floor.default, "Floor"),
                (aten.gelu.default, "Gelu"),
                (aten.hardswish.default, "Hardswish"),
                (aten.log.default, "Log"),
                (aten.neg.default, "Negate"),
                (aten.rsqrt.default, "ReciprocalSquareRoot"),
                (aten.sigmoid.default, "Sigmoid"),
                (aten.sin.default, "Sin"),
                (aten.sqrt.default, "SquareRoot"),
                (aten.tanh.default, "Tanh"),
            )
        },
        **{
            target: partial(_binary, kind)
            for target, kind in (
                (aten.add.Tensor, "Add"),
                (aten.add.Scalar, "Add"),
                (aten.maximum.default, "Maximum"),
                (aten.minimum.default, "Minimum"),
                (aten.mul.Tensor, "Multiply"),
                (aten.mul.Scalar, "Multiply"),
                (aten.sub.Tensor, "Subtract"),
                (aten.sub.Scalar, "Subtract"),
            )
        },
        aten._to_copy.default: _same,  # noqa: SLF001 - the operator's name
        aten.addmm.default: _linear,
        aten.bmm.default: _product,
        aten.cat.default: _concatenate,
        aten.clamp.default: _clamp,
        aten.clone.default: _same,
        aten.constant_pad_nd.default: _pad,
        aten.div.Scalar: _divide,
        aten.div.Tensor: _divide,
        aten.erf.default: _erf,
        aten.expand.default: _expand,
        aten.full.default: _fill,
        aten.mm.default: _product,
        aten.permute.default: _permute,
        aten.pow.Tensor_Scalar: _power,
        aten.reciprocal.default: _reciprocal,
        aten.relu.default: _relu,
        aten.rsub.Scalar: _subtract_from,
        aten.scalar_tensor.default: _fill,
        aten.sign.default: _sign,
        aten.silu.default: _silu,
        aten.view.default: _reshape,
        aten.zeros.default: _fill,
        part: _part,
        product_by_transposed: partial(_product, transpose_b=True),
    }
)
_CONDITIONS: Mapping[Any, Callable[[fx.Node], bool]] = MappingProxyType(
    {
        aten._log_softmax.default: _is_last_dim,  # noqa: SLF001 - the operator's name
        aten._softmax.default: _is_last_dim,  # noqa: SLF001 - the operator's name
        aten._to_copy.default: lambda node: isinstance(argument(node, 0), fx.Node) and is_floating(argument(node, 0)),  # noqa: SLF001 - the operator's name
        aten.addmm.default: _is_plain_addmm,
        aten.amax.default: _has_one_dim,
        aten.full.default: _is_small,
        aten.gelu.default: lambda node: node.kwargs.get("approximate", "none") == "none",
        aten.mean.dim: _has_dims,
        aten.pow.Tensor_Scalar: lambda node: argument(node, 1) in {2, 3},
        aten.sum.dim_IntList: _has_dims,
        aten.zeros.default: _is_small,
    }
)
"""Conditions of an operator's rule besides tensors in single precision."""


def is_supported(node: fx.Node) -> bool:
    """Return whether XNNPACK can do what a node does."""
    if node.op != "call_function" or node.target not in OPERATORS:
        return False
    tensors = [node, *node.all_input_nodes]
    condition = _CONDITIONS.get(node.target)
    return all(is_floating(tensor) for tensor in tensors) and (condition is None or condition(node))
