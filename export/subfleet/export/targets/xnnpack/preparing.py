"""Small rewrites of a graph before XNNPACK takes its part: masks as numbers, products by transposed factors, boxes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.canonical.cleaning import drop_dead_code
from subfleet.export.nodes import argument, shape_of
from subfleet.export.targets.xnnpack.graph import is_floating
from subfleet.export.targets.xnnpack.operators import part, product_by_transposed

__all__ = ["prepare"]

aten = torch.ops.aten

_HUGE = 1e38
"""Multiplied by this, a difference other than 0 exceeds 1; numbers below 1e-38 are not normal."""


class _MaskBuilder:
    """Inserts nodes before another one, all with its shape and in single precision."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self._graph = graph
        self._like = like

    def __call__(self, target: Any, *arguments: Any) -> fx.Node:
        node = self._graph.call_function(target, arguments)
        node.meta["val"] = self._like.meta["val"]
        return node

    def above(self, a: Any, b: Any) -> fx.Node:
        """Return 1 where a is above b, and 0 elsewhere."""
        if isinstance(b, fx.Node) or b != 0:
            a = (
                self(aten.sub.Tensor, a, b)
                if isinstance(a, fx.Node)
                else self(aten.add.Tensor, self(aten.neg.default, b), a)
            )
        return self(aten.clamp.default, self(aten.mul.Tensor, a, _HUGE), 0.0, 1.0)

    def differs(self, a: Any, b: Any) -> fx.Node:
        """Return 1 where a and b differ, and 0 elsewhere."""
        distance = self(aten.abs.default, self(aten.sub.Tensor, a, b))
        return self(aten.clamp.default, self(aten.mul.Tensor, distance, _HUGE), 0.0, 1.0)

    def invert(self, mask: fx.Node) -> fx.Node:
        """Return 1 where the mask is 0, and 0 where it is 1."""
        return self(aten.add.Tensor, self(aten.neg.default, mask), 1.0)


_Comparison = Callable[[_MaskBuilder, Any, Any], fx.Node]
_COMPARISONS: Mapping[str, _Comparison] = MappingProxyType(
    {
        "aten::gt": lambda chain, a, b: chain.above(a, b),
        "aten::lt": lambda chain, a, b: chain.above(b, a),
        "aten::ge": lambda chain, a, b: chain.invert(chain.above(b, a)),
        "aten::le": lambda chain, a, b: chain.invert(chain.above(a, b)),
        "aten::ne": lambda chain, a, b: chain.differs(a, b),
        "aten::eq": lambda chain, a, b: chain.invert(chain.differs(a, b)),
    }
)


def _comparison_of(node: fx.Node) -> tuple[_Comparison, fx.Node] | None:
    """Return the comparison of floating numbers that a node converts to 0 and 1, with its rule."""
    compared: Any = node.args[0]
    if not is_floating(node) or not isinstance(compared, fx.Node) or compared.op != "call_function":
        return None
    schema = getattr(compared.target, "_schema", None)
    rule = _COMPARISONS.get(schema.name) if schema else None
    if rule is None or not all(is_floating(argument) for argument in compared.all_input_nodes):
        return None
    return rule, compared


def _write_mask(graph: fx.Graph, node: fx.Node) -> None:
    comparison = _comparison_of(node)
    if comparison is None:
        return
    rule, compared = comparison
    with graph.inserting_before(node):
        node.replace_all_uses_with(rule(_MaskBuilder(graph, node), *compared.args[:2]))


def _swaps_last(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.permute.default:
        return False
    dims: Any = node.args[1]
    rank = len(dims)
    return rank >= 2 and [dim % rank for dim in dims] == [*range(rank - 2), rank - 1, rank - 2]


def _write_product(node: fx.Node) -> None:
    first, second = argument(node, 0), argument(node, 1)
    if _swaps_last(second) and is_floating(node):
        node.target, node.args = product_by_transposed, (first, second.args[0])


def _write_part(node: fx.Node) -> None:
    """Turn a slice into a box, combined with the box that its source may be."""
    source: Any = node.args[0]
    dim, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start"), argument(node, 4, "step", 1)
    given, sizes = shape_of(source), shape_of(node)
    if step != 1 or not is_floating(node) or not given:
        return
    axis = dim % len(given)
    first: Any = start or 0
    offsets = [0] * len(given)
    offsets[axis] = max(first + given[axis], 0) if first < 0 else min(first, given[axis])
    if source.target is part:
        offsets = [a + b for a, b in zip(source.args[1], offsets, strict=True)]
        source = source.args[0]
    node.target, node.args = part, (source, offsets, list(sizes))


def prepare(graph: fx.GraphModule) -> None:
    """Rewrite a graph in place into operators that XNNPACK has."""
    for node in list(graph.graph.nodes):
        if node.target is aten._to_copy.default:  # noqa: SLF001 - the operator's name
            _write_mask(graph.graph, node)
        elif node.target is aten.slice.Tensor:
            _write_part(node)
        elif node.target in {aten.mm.default, aten.bmm.default}:
            _write_product(node)
    drop_dead_code(graph)
