"""Matrix products of tensors as they lie: the second factor, or the whole product, may be transposed for free."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.layouts.transpositions import GraphRewriter, HeldTensor, Rule, rewrite_plain
from subfleet.export.nodes import argument, shape_of

__all__ = ["PRODUCTS"]

aten = torch.ops.aten


def _rows_last(held: HeldTensor) -> bool | None:
    """True: held as (..., rows, columns); False: as (..., columns, rows); None: in another order, or expanded."""
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
    """A factor's node, and whether it is held transposed."""
    held = rewriting.expand(rewriting.tensor_of(argument))
    straight = _rows_last(held)
    if straight is None:
        rank = len(held.shape)
        # Of the two orders, the one that is a mere view.
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        node = rewriting.in_order(held, swapped)
        if node.target is aten.view.default or node is held.node:
            return node, True
        return rewriting.in_order(held, range(rank)), False
    return held.node, not straight


def _product(rewriting: GraphRewriter, node: fx.Node) -> None:
    """A B, where A must be held straight; or else the transposed product of the transposed factors."""
    first, second = argument(node, 0), argument(node, 1)
    a, a_transposed = _matrix(rewriting, first)
    b, b_transposed = _matrix(rewriting, second)
    shape = shape_of(node)
    rank = len(shape)
    batch = tuple(range(rank - 2))
    dtype = node.meta["val"].dtype
    swap = (*batch, rank - 1, rank - 2)
    if a_transposed and b_transposed:
        turned = rewriting.add(node.target, (b, a), [shape[dim] for dim in swap], dtype)
        rewriting.bind(node, HeldTensor(node=turned, shape=shape, order=swap))
        return
    if a_transposed:
        a = rewriting.permute(a, swap)
    if b_transposed:
        # Written as a transposition, which the product takes up.
        b = rewriting.permute(b, swap)
    rewriting.bind_plain(node, rewriting.add(node.target, (a, b), shape, dtype))


def _product_with_bias(rewriting: GraphRewriter, node: fx.Node) -> None:
    bias, first, second = (argument(node, index) for index in range(3))
    if node.kwargs or len(rewriting.tensor_of(bias).shape) != 1:
        rewrite_plain(rewriting, node)
        return
    a, a_transposed = _matrix(rewriting, first)
    b, b_transposed = _matrix(rewriting, second)
    a = rewriting.permute(a, (1, 0)) if a_transposed else a
    b = rewriting.permute(b, (1, 0)) if b_transposed else b
    arguments = (rewriting.plain(rewriting.tensor_of(bias)), a, b)
    shape = node.meta["val"].shape
    rewriting.bind_plain(node, rewriting.add(node.target, arguments, shape, node.meta["val"].dtype))


PRODUCTS: Mapping[Any, Rule] = MappingProxyType(
    {aten.mm.default: _product, aten.bmm.default: _product, aten.addmm.default: _product_with_bias}
)
