"""Which part of a graph goes to XNNPACK, in as few regions as the order of their data allows."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

__all__ = ["Region", "phases", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Nodes that are run together.

    Attributes:
        nodes: in the graph's order.
        inputs: nodes from elsewhere that they need.
        outputs: those of them that are needed elsewhere.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def phases(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """The phase of every call: odd ones hold the chosen nodes, even ones the others, and data flow only forwards."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            found[node] = 0
            continue
        before = max((found[argument] for argument in node.all_input_nodes), default=0)
        wanted = int(chosen(node))
        if node.target is operator.getitem:
            wanted = before % 2
        found[node] = before if before % 2 == wanted else before + 1
    return found


def split(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> list[Sequence[fx.Node] | Region]:
    """The graph's calls in an order that may run: single nodes' sequences, and regions of chosen nodes."""
    found = phases(graph, chosen)
    last = max(found.values(), default=0)
    parts: list[Sequence[fx.Node] | Region] = []
    for phase in range(last + 1):
        nodes = [node for node in graph.nodes if node.op == "call_function" and found[node] == phase]
        if phase % 2 == 0:
            parts.append(nodes)
            continue
        inside = set(nodes)
        inputs = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside)
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        parts.append(Region(nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(outputs)))
    return parts
