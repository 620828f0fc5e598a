"""Reading the nodes of a traced graph."""

from typing import Any

from torch import fx

__all__ = ["argument", "shape_of"]


def argument(node: fx.Node, place: int, name: str = "", default: Any = None) -> Any:
    """An argument by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Of a node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)
