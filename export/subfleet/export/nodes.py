"""Reading and writing the nodes of a traced graph."""

from collections.abc import Mapping
from typing import Any

from torch import fx


def argument(node: fx.Node, index: int, name: str = "", default: Any = None) -> Any:
    """Return an argument of a node by its position or its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)


def append_call(
    graph: fx.Graph, target: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], name: str | None = None
) -> fx.Node:
    """Append a call to a graph.

    The arguments are set afterwards: PyTorch would search them for symbols if they were given with the node.
    """
    node = graph.create_node("call_function", target, name=name)
    node._update_args_kwargs(arguments, dict(options))  # noqa: SLF001 - both at once, and no table follows from them
    return node
