"""Removes operators that only affect memory and dead code from a functional graph, and folds constants."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

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
"""Operators that return their input's numbers, in other memory or without autograd."""
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})  # noqa: SLF001 - the operator's name


def clean(graph: fx.GraphModule) -> None:
    """Clean a graph in which no operator changes a tensor; its results stay the same."""
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
            # The tensor may have any order in memory, as copies that made it contiguous are gone; all sizes are given.
            node.target = aten.reshape.default
            node.args = (node.args[0], [int(size) for size in node.meta["val"].shape])
    drop_dead_code(graph)


def drop_dead_code(graph: fx.GraphModule) -> None:
    """Remove everything that no result depends on, even if it draws random numbers."""
    for node in reversed(graph.graph.nodes):
        if not node.users and node.op not in {"placeholder", "output"}:
            graph.graph.erase_node(node)
    graph.recompile()


def _copy_value(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return what a copy writes, in the type and shape of its destination."""
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


_FILLS = frozenset({
    aten.full.default, aten.zeros.default, aten.ones.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default, aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.expand.default,
})  # fmt: skip
"""Operators that repeat a few numbers: as constants they would only make a program larger."""
_UNKNOWN = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})
"""Operators that return uninitialised memory."""


def fold_constants(graph: fx.GraphModule) -> None:
    """Replace values that depend on constants only by constants, if anything else reads them.

    Repetitions of a constant are left to the runtime. Equal constants become one.
    """
    constant: dict[fx.Node, Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, node.target), Tensor):
            constant[node] = getattr(graph, node.target).detach()
        elif node.op == "call_function" and _is_constant(node, constant):
            value = _value(node, constant)
            if isinstance(value, Tensor):
                constant[node] = value
    _ConstantHolder(graph).hold(constant)
    drop_dead_code(graph)


def _is_constant(node: fx.Node, constant: Mapping[fx.Node, Tensor]) -> bool:
    if node.target in _UNKNOWN or not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - the type's name
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags and all(
        given in constant for given in node.all_input_nodes
    )


def _value(node: fx.Node, constant: Mapping[fx.Node, Tensor]) -> Any:
    arguments, options = fx.node.map_arg((node.args, dict(node.kwargs)), lambda given: constant[given])
    target: Any = node.target
    return target(*arguments, **options)


class _ConstantHolder:
    """The constants in a graph, each once."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._nodes: dict[tuple[Any, ...], fx.Node] = {}
        self._first = next(iter(graph.graph.nodes))

    def hold(self, constant: Mapping[fx.Node, Tensor]) -> None:
        """Replace each constant value that a repetition, or something that is not constant, reads."""
        for node, value in constant.items():
            if node.op != "get_attr" and node.target in _FILLS:
                continue
            if any(user not in constant or user.target in _FILLS for user in node.users):
                node.replace_all_uses_with(self._node_for(node, value))

    def _node_for(self, node: fx.Node, value: Tensor) -> fx.Node:
        plain = value.contiguous()
        key = (
            plain.dtype,
            tuple(plain.shape),
            plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
        )
        if key not in self._nodes:
            with self._graph.graph.inserting_before(self._first):
                held = self._make_node(plain)
            held.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)  # as it lies in memory now
            self._nodes[key] = held
        return self._nodes[key]

    def _make_node(self, value: Tensor) -> fx.Node:
        """Return a node with a constant; the runtime creates repetitions of one number."""
        if value.numel() and bool((value == value.view(-1)[0]).all()):
            number = value.view(-1)[0].item()
            return self._graph.graph.call_function(
                aten.full.default, (list(value.shape), number), {"dtype": value.dtype}
            )
        name = f"_constant{len(self._nodes)}"
        self._graph.register_buffer(name, value)
        return self._graph.graph.get_attr(name)
