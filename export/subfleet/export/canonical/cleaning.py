"""Takes out of a functional graph what only matters to memory, and what nothing depends on."""

from typing import Any

import torch
from torch import fx

__all__ = ["clean", "drop_dead_code"]

aten = torch.ops.aten
_SAME = frozenset(
    {
        aten.detach.default,
        aten.detach_.default,
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
    }
)
"""Operators that give the numbers they are given: of another memory, or unknown to autograd."""
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})  # noqa: SLF001 - the operator's name


def clean(graph: fx.GraphModule) -> None:
    """Clean a graph in which no operator changes a tensor; what it computes stays the same."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.target is aten.copy.default:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(_copy_value(graph, node))
            graph.graph.erase_node(node)
        elif node.target in _VIEWS:
            # Of a tensor of any order in memory, as copies that made it contiguous are gone; no size is left open.
            node.target = aten.reshape.default
            node.args = (node.args[0], [int(size) for size in node.meta["val"].shape])
    drop_dead_code(graph)


def drop_dead_code(graph: fx.GraphModule) -> None:
    """Take out what no result depends on, also where it would draw random numbers."""
    for node in reversed(graph.graph.nodes):
        if not node.users and node.op not in {"placeholder", "output"}:
            graph.graph.erase_node(node)
    graph.recompile()


def _copy_value(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    """What a copy writes, in the type and shape of what it writes to."""
    value: Any = node.args[1]
    target = node.meta["val"]
    if value.meta["val"].dtype != target.dtype:
        value = graph.graph.call_function(aten._to_copy.default, (value,), {"dtype": target.dtype})  # noqa: SLF001
        value.meta["val"] = node.args[1].meta["val"].to(target.dtype)  # type: ignore[union-attr] # it is a node
    if tuple(value.meta["val"].shape) != tuple(target.shape):
        value = graph.graph.call_function(aten.expand.default, (value, [int(size) for size in target.shape]))
        value.meta["val"] = target
    result: fx.Node = value
    return result
