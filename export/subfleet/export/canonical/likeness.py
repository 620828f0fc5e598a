"""Whether graphs compute the same, whatever their nodes are called."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["are_alike", "numbers"]


def are_alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs compute the same of inputs at the same places."""
    known: dict[Hashable, int] = {}
    found = []
    for graph in (one, other):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        results: Any = graph.graph.output_node().args[0]
        found.append(numbers(graph, inputs, list(results), known))
    return found[0] == found[1]


def numbers(
    graph: fx.GraphModule, own: Sequence[fx.Node], results: Sequence[fx.Node], known: dict[Hashable, int]
) -> list[int]:
    """For each result a number that stands for how it is computed: equal ones are computed alike.

    Args:
        graph: in which no operator changes a tensor.
        own: nodes of the run's own tensors: alike where they have the same place.
        results: its results.
        known: the numbers given so far.
    """
    places = {node: place for place, node in enumerate(own)}
    found: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        key: Hashable
        if node.op == "placeholder":
            key = ("own", places[node]) if node in places else ("other", node.name)
        elif node.op == "get_attr":
            key = ("held", _value(getattr(graph, node.target)))
        else:
            given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: f"%{found[part]}")
            key = (str(node.target), repr(given))
        found[node] = known.setdefault(key, len(known))
    return [found[node] for node in results]


def _value(tensor: Any) -> Hashable:
    """A tensor made anew in each run is the same if its numbers are."""
    if type(tensor) not in {Tensor, nn.Parameter}:
        return id(tensor)
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(bits)
