"""A graph in canonical form with the operators of a table in simpler ones.

Nothing is traced again but the lowerings themselves, each once for all nodes that call the operator with tensors of the
same shapes and the same other arguments.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule  # code that nothing runs is not written

from subfleet.export.canonical.checks import is_functional
from subfleet.export.canonical.cleaning import clean
from subfleet.export.failures import as_export_errors
from subfleet.export.nodes import called
from subfleet.export.recording import recorded
from subfleet.protocol.errors import ExportError

__all__ = ["lowered"]

aten = torch.ops.aten
Table = Mapping[Any, Callable[..., Any]]


def lowered(graph: fx.GraphModule, table: Table, only: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Lower a graph in canonical form.

    Args:
        graph: it is left as it is.
        table: by operator what to compute in its place; NotImplemented leaves a call as it is.
        only: which calls; None is all.

    Raises:
        ExportError: an operator cannot be lowered.
    """
    listed = (node for node in graph.graph.nodes if node.op == "call_function" and node.target in table)
    calls = {node: _Call(node) for node in listed if only is None or only(node)}
    traced = _traced(list({call.key: call for call in calls.values()}.values()), table)
    new = _Writing(graph, traced).write({node: call.key for node, call in calls.items()})
    clean(new)
    for node in new.graph.find_nodes(op="call_function", target=aten.reshape.default):
        node.target = aten.view.default
    return new


class _Call:
    """One node's call of an operator that is to be lowered."""

    def __init__(self, node: fx.Node) -> None:
        self.target = node.target
        self.inputs = list(node.all_input_nodes)
        places: dict[fx.Node, Any] = {given: _Place(place) for place, given in enumerate(self.inputs)}
        self.arguments: Any = fx.node.map_arg((node.args, dict(node.kwargs)), places.__getitem__)
        self.values = [given.meta["val"] for given in self.inputs]
        alike = [(tuple(value.shape), tuple(value.stride()), value.dtype) for value in self.values]
        self.key = repr((str(node.target), self.arguments, alike))


@dataclass(frozen=True)
class _Place:
    """Stands for the input at a place among a call's inputs."""

    place: int


@dataclass(frozen=True, kw_only=True)
class _Lowering:
    """What a call becomes: nodes in order, of which the first are its inputs."""

    inputs: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    results: Any


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """Lowerings by the key of their calls, without those that leave it as it is, and the constants that they hold."""

    lowerings: Mapping[str, _Lowering] = field(default_factory=dict)
    graph: fx.GraphModule | None = None


def _traced(calls: Sequence[_Call], table: Table) -> _Traced:
    """Trace the lowerings of different calls, all at once."""
    if not calls:
        return _Traced()
    run = _Running(calls, table)
    remedy = "use another layer, and report it with the request"
    with as_export_errors("an operator of the training step cannot be lowered", remedy):
        graph = recorded(run, run.inputs, table)
    if not is_functional(graph):  # dead code could not be told from a change that nothing reads
        raise ExportError("a lowering changes a tensor in place; report it with the request")
    inputs = iter([node for node in graph.graph.nodes if node.op == "placeholder"])
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    results: Any = graph.graph.output_node().args[0]
    lowerings = {}
    for call in calls:
        own = [next(inputs) for _ in call.values]
        if call.key in run.results:
            given = _filled(run.results[call.key], results)
            nodes = sorted(_needed(given) - set(own), key=places.__getitem__)
            lowerings[call.key] = _Lowering(inputs=own, nodes=nodes, results=given)
    return _Traced(lowerings=lowerings, graph=graph)


class _Running:
    """Runs the lowerings of calls, one after the other."""

    def __init__(self, calls: Sequence[_Call], table: Table) -> None:
        self._calls, self._table = calls, table
        # Objects of their own: the tracer knows a tensor by its identity, and a call by its inputs.
        self.inputs = [value.detach() for call in calls for value in call.values]
        self.results: dict[str, Any] = {}
        """What each gives, with places among all results; calls that are left as they are have none."""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """All results of all lowerings."""
        given, found = iter(tensors), list[Tensor]()
        self.results.clear()
        for call in self._calls:
            arguments, options = _filled(call.arguments, [next(given) for _ in call.values])
            result = self._table[call.target](*arguments, **options)
            if result is not NotImplemented:
                self.results[call.key] = _placed(result, found)
        return found


def _placed(result: Any, found: list[Tensor]) -> Any:
    """A result with the places of its tensors, which are added to those that were found."""
    if isinstance(result, (tuple, list)):
        return [_placed(one, found) for one in result]
    if isinstance(result, Tensor):
        found.append(result)
        return _Place(len(found) - 1)
    return result


def _filled(arguments: Any, tensors: Sequence[Any]) -> Any:
    """What stands at places, put there."""
    if isinstance(arguments, _Place):
        return tensors[arguments.place]
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_filled(one, tensors) for one in arguments)
    if isinstance(arguments, dict):
        return {name: _filled(one, tensors) for name, one in arguments.items()}
    return arguments


def _needed(results: Any) -> set[fx.Node]:
    """The nodes that results follow from, themselves included."""
    found: set[fx.Node] = set()
    left: list[fx.Node] = []
    fx.node.map_arg(results, left.append)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return found


class _Writing:
    """A new graph, node by node."""

    def __init__(self, old: fx.GraphModule, traced: _Traced) -> None:
        self._old, self._traced = old, traced
        self._graph = fx.Graph()
        self._held: dict[str, Any] = {}
        self._values: dict[fx.Node, Any] = {}

    def write(self, keys: Mapping[fx.Node, str]) -> fx.GraphModule:
        """Copy the old graph, with the lowering in the place of each call that has one."""
        for node in self._old.graph.nodes:
            lowering = self._traced.lowerings.get(keys.get(node, ""))
            if lowering is not None:
                self._values[node] = self._inlined(lowering, node)
            elif node.target is operator.getitem and isinstance(self._values[node.args[0]], (tuple, list)):
                self._values[node] = self._values[node.args[0]][node.args[1]]
            else:
                self._values[node] = self._copied(node, self._values, self._old, "")
        return _LazyGraphModule(self._held, self._graph)

    def _inlined(self, lowering: _Lowering, node: fx.Node) -> Any:
        values = {given: self._values[old] for given, old in zip(lowering.inputs, node.all_input_nodes, strict=True)}
        for one in lowering.nodes:
            values[one] = self._copied(one, values, self._traced.graph, "_lowered")
        return fx.node.map_arg(lowering.results, lambda one: values[one])

    def _copied(self, node: fx.Node, values: Mapping[fx.Node, Any], owner: Any, prefix: str) -> fx.Node:
        if node.op == "call_function":
            arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            new = called(self._graph, node.target, arguments, options, node.name)
            new.meta.update(node.meta)
            return new
        new = self._graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            new.target = f"{prefix}{node.target}"
            self._held[new.target] = getattr(owner, str(node.target))
        return new
