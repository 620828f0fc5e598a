"""What follows from constants alone, as constants."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from subfleet.export.canonical.cleaning import drop_dead_code

__all__ = ["fold_constants"]

aten = torch.ops.aten
_FILLS = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.new_full.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.expand.default,
    }
)
"""Operators that repeat a few numbers: as constants these would only make a program larger."""
_UNKNOWN = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})
"""Operators that give whatever is in memory."""


def fold_constants(graph: fx.GraphModule) -> None:
    """Put each value that follows from constants alone into the graph, where something else reads it.

    A repetition of a constant is left for the runtime to make. Equal constants become one.
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
    """The constants that a graph holds, each once."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._nodes: dict[tuple[Any, ...], fx.Node] = {}
        self._first = next(iter(graph.graph.nodes))

    def hold(self, constant: Mapping[fx.Node, Tensor]) -> None:
        """Replace each constant value that something else, or a repetition, reads."""
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
        """A node that gives a constant; one number repeated is made by the runtime."""
        if value.numel() and bool((value == value.view(-1)[0]).all()):
            number = value.view(-1)[0].item()
            return self._graph.graph.call_function(
                aten.full.default, (list(value.shape), number), {"dtype": value.dtype}
            )
        name = f"_constant{len(self._nodes)}"
        self._graph.register_buffer(name, value)
        return self._graph.graph.get_attr(name)
