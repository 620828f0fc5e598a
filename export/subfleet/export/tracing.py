"""A step to a flat graph of PyTorch's basic operators, lowered by the tables of a target."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from subfleet.export.canonical.capture import capture_step
from subfleet.export.canonical.checks import check_constants, check_operators
from subfleet.export.canonical.cleaning import clean
from subfleet.export.canonical.constants import fold_constants
from subfleet.export.canonical.masks import CHOSEN, find_unbounded
from subfleet.export.lowering import lower_graph
from subfleet.export.steps.values import Step

__all__ = ["canonical_graph", "inputs_of", "results_of", "trace"]

aten = torch.ops.aten


def trace(step: Step, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Trace a step with its shapes alone, and leave out what nothing depends on.

    Args:
        step: what to trace.
        table: lowerings, by operator.

    Returns:
        A graph module whose nodes carry a fake tensor of their shape and type in `meta["val"]`.

    Raises:
        ExportError: the step cannot be traced, for instance because a layer depends on values; or it does what no
            program can.
    """
    graph = lower_graph(canonical_graph(step), table)
    _copy_shared_results(graph)
    return graph


def canonical_graph(step: Step) -> fx.GraphModule:
    """A step as a graph in the form that `subfleet.export.canonical_graph` describes.

    Raises:
        ExportError: as `trace`.
    """
    graph = capture_step(step)
    clean(graph)
    check_constants(graph, step.carried, step.held)
    fold_constants(graph)
    check_operators(graph)
    far = find_unbounded(graph)
    if any(node.target in CHOSEN and node.args[0] in far for node in graph.graph.nodes):
        return lower_graph(graph, CHOSEN, lambda node: node.args[0] in far)
    return graph


def _copy_shared_results(graph: fx.GraphModule) -> None:
    """Copy each input that is also a result, and each result given twice: a runtime may lay one over another."""
    output = graph.graph.output_node()
    given: set[fx.Node] = set()
    results = []
    for node in results_of(graph):
        result = node
        if node.op != "call_function" or node in given:
            with graph.graph.inserting_before(output):
                result = graph.graph.call_function(aten.clone.default, (node,))
            result.meta["val"] = node.meta["val"]
        given.add(result)
        results.append(result)
    output.args = (tuple(results),)


def inputs_of(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a traced graph's inputs, in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def results_of(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose values a traced graph gives, in order."""
    results: Any = graph.graph.output_node().args[0]
    return list(results)
