"""Divides a graph between XNNPACK and the runtime, in as few regions as the data flow allows."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

__all__ = ["DelegateRegion", "phases_of", "split_regions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegateRegion:
    """Nodes that run together.

    Attributes:
        nodes: in the graph's order.
        inputs: nodes outside that they read.
        outputs: their nodes that are read outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def phases_of(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """Return the phase of every call: odd ones hold the chosen nodes, even ones the others; data only flow forwards."""
    phase_by_node: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            phase_by_node[node] = 0
            continue
        before = max((phase_by_node[argument] for argument in node.all_input_nodes), default=0)
        parity = int(chosen(node))
        if node.target is operator.getitem:
            parity = before % 2
        phase_by_node[node] = before if before % 2 == parity else before + 1
    return phase_by_node


def split_regions(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> list[Sequence[fx.Node] | DelegateRegion]:
    """Return the graph's calls in a valid order: sequences of single nodes, and regions of chosen nodes."""
    phase_by_node = phases_of(graph, chosen)
    last = max(phase_by_node.values(), default=0)
    parts: list[Sequence[fx.Node] | DelegateRegion] = []
    for phase in range(last + 1):
        nodes = [node for node in graph.nodes if node.op == "call_function" and phase_by_node[node] == phase]
        if phase % 2 == 0:
            parts.append(nodes)
            continue
        inside = set(nodes)
        inputs = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside)
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        parts.append(DelegateRegion(nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(outputs)))
    return parts
