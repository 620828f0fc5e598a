"""How each operator takes tensors with another order in memory than their shapes say.

In matrix products, the second factor or the whole product may be transposed at no cost.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from subfleet.export.layouts.transpositions import (
    GraphRewriter,
    HeldTensor,
    Rule,
    held_shape,
    inverse,
    reshape_order,
    rewrite_plain,
)
from subfleet.export.nodes import argument, shape_of

aten = torch.ops.aten


def _rows_last(held: HeldTensor) -> bool | None:
    """True: stored as (..., rows, columns); False: as (..., columns, rows); None: in another order, or expanded."""
    rank = len(held.shape)
    batch = tuple(range(rank - 2))
    if held.own_shape != held.shape:
        return None
    if held.order == (*batch, rank - 2, rank - 1):
        return True
    if held.order == (*batch, rank - 1, rank - 2):
        return False
    return None


def _matrix(rewriting: GraphRewriter, argument: fx.Node) -> tuple[fx.Node, bool]:
    """Return a factor's node, and whether it is transposed in memory."""
    held = rewriting.expand(rewriting.tensor_of(argument))
    straight = _rows_last(held)
    if straight is None:
        rank = len(held.shape)
        # Choose the order that is only a view.
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        node = rewriting.in_order(held, swapped)
        if node.target is aten.view.default or node is held.node:
            return node, True
        return rewriting.in_order(held, range(rank)), False
    return held.node, not straight


def _product(rewriting: GraphRewriter, node: fx.Node) -> None:
    """Multiply A B with A as it is in memory, or compute the transposed product of the transposed factors."""
    first, second = argument(node, 0), argument(node, 1)
    a, a_transposed = _matrix(rewriting, first)
    b, b_transposed = _matrix(rewriting, second)
    rank = len(shape_of(node))
    swap = (*range(rank - 2), rank - 1, rank - 2)
    if a_transposed and b_transposed:
        rewriting.write(node, (b, a), swap)
        return
    if a_transposed:
        a = rewriting.permute(a, swap)
    if b_transposed:
        # Written as a transposition, which the product absorbs.
        b = rewriting.permute(b, swap)
    rewriting.write(node, (a, b), range(rank))


def _product_with_bias(rewriting: GraphRewriter, node: fx.Node) -> None:
    bias, first, second = (argument(node, index) for index in range(3))
    if node.kwargs or len(rewriting.tensor_of(bias).shape) != 1:
        rewrite_plain(rewriting, node)
        return
    a, a_transposed = _matrix(rewriting, first)
    b, b_transposed = _matrix(rewriting, second)
    a = rewriting.permute(a, (1, 0)) if a_transposed else a
    b = rewriting.permute(b, (1, 0)) if b_transposed else b
    rewriting.write(node, (rewriting.plain(rewriting.tensor_of(bias)), a, b), range(2))


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _permute_as(rewriting: GraphRewriter, node: fx.Node, dims: Sequence[int]) -> None:
    held = rewriting.tensor_of(argument(node, 0))
    shape = tuple(held.shape[dim] for dim in dims)
    positions = inverse(dims)
    rewriting.bind(node, HeldTensor(node=held.node, shape=shape, order=tuple(positions[dim] for dim in held.order)))


def _permute(rewriting: GraphRewriter, node: fx.Node) -> None:
    rank = len(rewriting.tensor_of(argument(node, 0)).shape)
    _permute_as(rewriting, node, [_dim(dim, rank) for dim in argument(node, 1)])


def _transpose(rewriting: GraphRewriter, node: fx.Node) -> None:
    dims = list(range(len(rewriting.tensor_of(argument(node, 0)).shape)))
    a, b = (_dim(dim, len(dims)) for dim in (argument(node, 1, "", 0), argument(node, 2, "", -1)))
    dims[a], dims[b] = dims[b], dims[a]
    _permute_as(rewriting, node, dims)


def _reshape(rewriting: GraphRewriter, node: fx.Node) -> None:
    new = shape_of(node)
    held = rewriting.tensor_of(argument(node, 0))
    old = held.own_shape
    if old != held.shape:
        # Dimensions of size 1 may be added or dropped without changing an expansion.
        expanded = _reshape_expanded(held, new)
        if expanded is not None:
            rewriting.bind_view(node, held.node, *expanded)
            return
        held = rewriting.expand(held)
    new_order = reshape_order(held.shape, held.order, new)
    if new_order is None:
        rewriting.bind_plain(node, rewriting.view(rewriting.plain(held), new))
        return
    rewriting.bind_view(node, held.node, new, new_order)


def _reshape_expanded(held: HeldTensor, new: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return own shape and order after a reshape that only adds or drops dimensions of size 1; otherwise None."""
    solid = [dim for dim, size in enumerate(held.shape) if size != 1]
    targets = [dim for dim, size in enumerate(new) if size != 1]
    if [held.shape[dim] for dim in solid] != [new[dim] for dim in targets]:
        return None
    own_old = held.own_shape
    own = [1] * len(new)
    renamed = dict(zip(solid, targets, strict=True))
    for old, position in renamed.items():
        own[position] = own_old[old]
    order = [renamed[dim] for dim in held.order if dim in renamed]
    ones = [dim for dim in range(len(new)) if dim not in order]
    return tuple(own), (*ones, *order)


def _expand(rewriting: GraphRewriter, node: fx.Node) -> None:
    held = rewriting.tensor_of(argument(node, 0))
    rewriting.bind_view(node, held.node, *_add_dims(held, len(shape_of(node)) - len(held.shape)))


def _add_dims(held: HeldTensor, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return own shape and order with so many more dimensions of size 1 in front."""
    return (*[1] * count, *held.own_shape), (*range(count), *(dim + count for dim in held.order))


def _same(rewriting: GraphRewriter, node: fx.Node) -> None:
    rewriting.bind(node, rewriting.tensor_of(argument(node, 0)))


def _common_order(operands: Sequence[HeldTensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of a result: that of its largest operand; if they differ, that of a weight or another input."""
    plain = tuple(range(len(shape)))
    full = [operand for operand in operands if len(operand.shape) == len(shape)]
    if not full:
        return plain
    most = max(math.prod(operand.own_shape) for operand in full)
    largest = [operand for operand in full if math.prod(operand.own_shape) == most]
    if any(operand.plain and operand.node.op == "placeholder" for operand in largest):
        return plain
    return next((operand.order for operand in largest if not operand.plain), plain)


def _elementwise(rewriting: GraphRewriter, node: fx.Node) -> None:
    shape = shape_of(node)
    operands = [rewriting.tensor_of(argument) for argument in node.all_input_nodes]
    order = _common_order(operands, shape)
    own = np.broadcast_shapes(*(operand.own_shape for operand in operands))
    own = (*[1] * (len(shape) - len(own)), *own)

    def place_operand(argument: fx.Node) -> fx.Node:
        held = rewriting.tensor_of(argument)
        added = len(shape) - len(held.shape)
        if added:
            wide, wide_order = _add_dims(held, added)
            seen = rewriting.view(held.node, held_shape(wide, wide_order))
            held = HeldTensor(node=seen, shape=(*[1] * added, *held.shape), order=wide_order)
        return rewriting.in_order(held, order)

    arguments, options = fx.map_arg((node.args, node.kwargs), place_operand)
    rewriting.write(node, arguments, order, own=own, **options)


def _reduce(rewriting: GraphRewriter, node: fx.Node) -> None:
    held = rewriting.expand(rewriting.tensor_of(argument(node, 0)))
    rank = len(held.shape)
    dims_given = argument(node, 1, "dim") or []
    dims = {_dim(dim, rank) for dim in ([dims_given] if isinstance(dims_given, int) else dims_given)} or set(
        range(rank)
    )
    axes = sorted(inverse(held.order)[dim] for dim in dims)
    arguments = (held.node, axes, True)
    if argument(node, 2, "keepdim", False) or not rank:
        rewriting.write(node, arguments, held.order)
        return
    reduced_shape = tuple(1 if dim in dims else size for dim, size in enumerate(held.shape))
    new = rewriting.add(node.target, arguments, held_shape(reduced_shape, held.order), node.meta["val"].dtype)
    remaining = [dim for dim in range(rank) if dim not in dims]
    order = tuple(remaining.index(dim) for dim in held.order if dim not in dims)
    rewriting.bind_view(node, new, shape_of(node), order)


def _slice(rewriting: GraphRewriter, node: fx.Node) -> None:
    held = rewriting.tensor_of(argument(node, 0))
    dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start")
    end, step = argument(node, 3, "end"), argument(node, 4, "step", 1)
    dim = _dim(dim, len(held.shape))
    shape = shape_of(node)
    if held.own_shape[dim] == 1 and held.shape[dim] != 1:  # a part of an expanded dimension
        rewriting.bind(node, HeldTensor(node=held.node, shape=shape, order=held.order))
        return
    own = (*held.own_shape[:dim], shape[dim], *held.own_shape[dim + 1 :])
    axis = inverse(held.order)[dim]
    rewriting.write(node, (held.node, axis, start, end, step), held.order, own=own)


def _select(rewriting: GraphRewriter, node: fx.Node) -> None:
    held = rewriting.expand(rewriting.tensor_of(argument(node, 0)))
    dim, index = _dim(argument(node, 1), len(held.shape)), argument(node, 2)
    index = index % held.shape[dim]
    axis = inverse(held.order)[dim]
    cut = list(held.node.meta["val"].shape)
    cut[axis] = 1
    dtype = node.meta["val"].dtype
    part = rewriting.add(aten.slice.Tensor, (held.node, axis, index, index + 1, 1), cut, dtype)
    order = tuple(other - (other > dim) for other in held.order if other != dim)
    rewriting.bind_view(node, part, shape_of(node), order)


def _pad(rewriting: GraphRewriter, node: fx.Node) -> None:
    held = rewriting.expand(rewriting.tensor_of(argument(node, 0)))
    rank = len(held.shape)
    around = [(0, 0)] * rank
    pads = list(argument(node, 1))
    for index in range(len(pads) // 2):
        around[rank - 1 - index] = (pads[2 * index], pads[2 * index + 1])
    flat = [size for dim in reversed(held.order) for size in around[dim]]
    rewriting.write(node, (held.node, flat, argument(node, 2, "value", 0.0)), held.order)


def _concatenate(rewriting: GraphRewriter, node: fx.Node) -> None:
    parts = [rewriting.expand(rewriting.tensor_of(part)) for part in argument(node, 0)]
    shape = shape_of(node)
    dim = _dim(argument(node, 1, "dim", 0), len(shape))
    order = _common_order([part for part in parts if len(part.shape) == len(shape)], shape)
    nodes = [rewriting.in_order(part, order) for part in parts]
    rewriting.write(node, (nodes, inverse(order)[dim]), order)


_ELEMENTWISE = (
    aten.abs.default, aten.add.Scalar, aten.add.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.ceil.default, aten.clamp.default, aten.cos.default, aten.div.Scalar, aten.div.Tensor, aten.eq.Scalar,
    aten.eq.Tensor, aten.erf.default, aten.exp.default, aten.floor.default, aten.ge.Scalar, aten.ge.Tensor,
    aten.gelu.default, aten.gt.Scalar, aten.gt.Tensor, aten.hardswish.default, aten.le.Scalar, aten.le.Tensor,
    aten.log.default, aten.logical_and.default, aten.logical_not.default, aten.lt.Scalar, aten.lt.Tensor,
    aten.maximum.default, aten.minimum.default, aten.mul.Scalar, aten.mul.Tensor, aten.ne.Scalar, aten.ne.Tensor,
    aten.neg.default, aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.relu.default, aten.rsqrt.default,
    aten.rsub.Scalar, aten.sigmoid.default, aten.sign.default, aten.silu.default, aten.sin.default,
    aten.sqrt.default, aten.sub.Scalar, aten.sub.Tensor, aten.tanh.default, aten.where.self,
    aten._to_copy.default,  # noqa: SLF001 - the operators' names
)  # fmt: skip

RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.mm.default: _product,
        aten.bmm.default: _product,
        aten.addmm.default: _product_with_bias,
        **dict.fromkeys(_ELEMENTWISE, _elementwise),
        aten.cat.default: _concatenate,
        aten.clone.default: _same,
        aten.constant_pad_nd.default: _pad,
        aten.expand.default: _expand,
        aten.mean.dim: _reduce,
        aten.amax.default: _reduce,
        aten.permute.default: _permute,
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.squeeze.dim: _reshape,
        aten.squeeze.dims: _reshape,
        aten.sum.dim_IntList: _reduce,
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.unsqueeze.default: _reshape,
        aten.view.default: _reshape,
    }
)
