"""A step to a flat graph of PyTorch's basic operators, lowered by the tables of a target."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.lowerings.in_place import write_copies
from subfleet.export.steps.values import Step
from subfleet.protocol.errors import ExportError

__all__ = ["inputs_of", "results_of", "trace"]

aten = torch.ops.aten
_NOTHING = frozenset(
    {
        aten.detach.default,
        aten.detach_.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
    }
)
"""Operators that only matter to autograd."""
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})  # noqa: SLF001 - the operator's name


def trace(step: Step, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Trace a step with its shapes alone, and leave out what nothing depends on.

    Args:
        step: what to trace.
        table: lowerings, by operator.

    Returns:
        A graph module whose nodes carry a fake tensor of their shape and type in `meta["val"]`.

    Raises:
        ExportError: the step cannot be traced, for instance because a layer depends on values.
    """
    example = step.example(torch.Generator().manual_seed(0))
    try:
        module = make_fx(step.run, decomposition_table=dict(table), tracing_mode="fake")(*example)
    except ExportError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"the training step cannot be traced: {type(error).__name__}: {reason}; use layers whose shapes do not "
            "depend on values"
        ) from error
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_function" and node.target in _VIEWS:
            node.target = aten.view.default
            node.args = (node.args[0], [int(size) for size in node.meta["val"].shape])  # no size is left open
    write_copies(module)
    _own_results(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _own_results(graph: fx.GraphModule) -> None:
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
