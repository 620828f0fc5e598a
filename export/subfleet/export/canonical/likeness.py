"""Compares what graphs compute, independent of the names of their nodes."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["are_alike", "number_results"]


def are_alike(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Return whether two graphs compute the same from their inputs."""
    known: dict[Hashable, int] = {}
    numbers = []
    for graph in (first, second):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        results: Any = graph.graph.output_node().args[0]
        numbers.append(number_results(graph, inputs, list(results), known))
    return numbers[0] == numbers[1]


def number_results(
    graph: fx.GraphModule, own: Sequence[fx.Node], results: Sequence[fx.Node], known: dict[Hashable, int]
) -> list[int]:
    """Return a number for each result that identifies how it is computed: equal ones are computed in the same way.

    Args:
        graph: without operators that change a tensor.
        own: nodes of the run's own tensors, which are identified by their position.
        results: its results.
        known: numbers assigned so far.
    """
    positions = {node: position for position, node in enumerate(own)}
    number_of: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        key: Hashable
        if node.op == "placeholder":
            key = ("own", positions[node]) if node in positions else ("other", node.name)
        elif node.op == "get_attr":
            key = ("held", _value(getattr(graph, node.target)))
        else:
            given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: f"%{number_of[part]}")
            key = (str(node.target), repr(given))
        number_of[node] = known.setdefault(key, len(known))
    return [number_of[node] for node in results]


def _value(tensor: Any) -> Hashable:
    """Identify a tensor that each run creates anew by its numbers."""
    if type(tensor) not in {Tensor, nn.Parameter}:
        return id(tensor)
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(bits)
