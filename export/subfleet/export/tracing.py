"""Captures a step as a flat graph of PyTorch's basic operators, and lowers it by a target's table.

Only the lowerings are traced again, each once for all calls of an operator with the same shapes and arguments.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule  # code that nothing runs is not written

from subfleet.export.canonical.checks import are_alike, check_constants, check_operators, is_functional
from subfleet.export.canonical.cleaning import clean, fold_constants
from subfleet.export.canonical.masks import CHOSEN, find_unbounded, mask_before_pools
from subfleet.export.nodes import append_call
from subfleet.export.recording import record, trace_functional
from subfleet.export.steps.seeding import SeededRandomness
from subfleet.export.steps.step import DTYPES, Step
from subfleet.export.tools import as_export_errors
from subfleet.protocol.errors import ExportError

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def capture_step(step: Step) -> fx.GraphModule:
    """Trace a step with its shapes only. Nodes carry a fake tensor of their shape and type in `meta["val"]`.

    A change in place becomes a new tensor, and so does every view of the changed tensor. Tensors that the network holds
    are attributes of the graph. The step is traced twice: what differs by chance, or by unknown state, must not become
    a program.

    Raises:
        ExportError: the step cannot be traced, for example because a layer depends on values; or it differs between
            runs.
    """
    with SeededRandomness(0):
        first = _trace_step(step)
    with SeededRandomness(1):
        if are_alike(first, _trace_step(step)):
            return first
    raise ExportError(
        "the network behaves differently each time it runs, because of a counter, an iterator or its own random "
        "numbers, but a program does the same in every step; draw with torch.rand, torch.randn or torch.bernoulli, and "
        "keep counts in a persistent buffer of torch.float32"
    )


def _trace_step(step: Step) -> fx.GraphModule:
    shapes = [torch.empty(value.shape, dtype=_TYPES[value.dtype], device="meta") for value in step.inputs]
    with as_export_errors("the training step cannot be traced", "use layers whose shapes do not depend on values"):
        return trace_functional(step.run, shapes, lambda: step.example(torch.Generator().manual_seed(0)))


aten = torch.ops.aten
Table = Mapping[Any, Callable[..., Any]]


def lower_graph(graph: fx.GraphModule, table: Table, only: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Lower a graph in canonical form.

    Args:
        graph: it is not changed.
        table: replacements by operator; NotImplemented leaves a call unchanged.
        only: which calls to lower; None is all.

    Raises:
        ExportError: an operator cannot be lowered.
    """
    listed = (node for node in graph.graph.nodes if node.op == "call_function" and node.target in table)
    calls = {node: _OperatorCall(node) for node in listed if only is None or only(node)}
    lowerings, constants = _trace_lowerings(list({call.key: call for call in calls.values()}.values()), table)
    new = _GraphWriter(graph, lowerings, constants).write({node: call.key for node, call in calls.items()})
    clean(new)
    for node in new.graph.find_nodes(op="call_function", target=aten.reshape.default):
        node.target = aten.view.default
    return new


class _OperatorCall:
    """A node's call of an operator that is to be lowered."""

    def __init__(self, node: fx.Node) -> None:
        self.target = node.target
        self.inputs = list(node.all_input_nodes)
        references: dict[fx.Node, Any] = {given: _InputRef(index) for index, given in enumerate(self.inputs)}
        self.arguments: Any = fx.node.map_arg((node.args, dict(node.kwargs)), references.__getitem__)
        self.values = [given.meta["val"] for given in self.inputs]
        alike = [(tuple(value.shape), tuple(value.stride()), value.dtype) for value in self.values]
        self.key = repr((str(node.target), self.arguments, alike))


@dataclass(frozen=True)
class _InputRef:
    """A reference to one of a call's inputs, by index."""

    index: int


@dataclass(frozen=True, kw_only=True)
class _Lowering:
    """The replacement of a call: the nodes in order, and which of them are its inputs."""

    inputs: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    results: Any


def _trace_lowerings(
    calls: Sequence[_OperatorCall], table: Table
) -> tuple[Mapping[str, _Lowering], fx.GraphModule | None]:
    """Trace the lowerings of different calls, all at once; return them by key, and the graph with their constants."""
    if not calls:
        return {}, None
    run = _LoweringRun(calls, table)
    remedy = "use another layer, and report it with the request"
    with as_export_errors("an operator of the training step cannot be lowered", remedy):
        graph = record(run, run.inputs, table)
    if not is_functional(graph):  # dead code could not be told from an unread change
        raise ExportError("a lowering changes a tensor in place; report it with the request")
    inputs = iter([node for node in graph.graph.nodes if node.op == "placeholder"])
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    results: Any = graph.graph.output_node().args[0]
    lowerings = {}
    for call in calls:
        own = [next(inputs) for _ in call.values]
        if call.key in run.results:
            given = _insert_tensors(run.results[call.key], results)
            nodes = sorted(_collect_dependencies(given) - set(own), key=order.__getitem__)
            lowerings[call.key] = _Lowering(inputs=own, nodes=nodes, results=given)
    return lowerings, graph


class _LoweringRun:
    """Runs the lowerings of calls, one after the other."""

    def __init__(self, calls: Sequence[_OperatorCall], table: Table) -> None:
        self._calls, self._table = calls, table
        # Separate objects: the tracer identifies tensors by identity, and calls by their inputs.
        self.inputs = [value.detach() for call in calls for value in call.values]
        self.results: dict[str, Any] = {}
        """What each gives, with places among all results; calls that are left as they are have none."""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return all results of all lowerings."""
        given, tensors_found = iter(tensors), list[Tensor]()
        self.results.clear()
        for call in self._calls:
            arguments, options = _insert_tensors(call.arguments, [next(given) for _ in call.values])
            result = self._table[call.target](*arguments, **options)
            if result is not NotImplemented:
                self.results[call.key] = _extract_tensors(result, tensors_found)
        return tensors_found


def _extract_tensors(result: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of a result to a list, and return the result with references in their place."""
    if isinstance(result, (tuple, list)):
        return [_extract_tensors(item, tensors) for item in result]
    if isinstance(result, Tensor):
        tensors.append(result)
        return _InputRef(len(tensors) - 1)
    return result


def _insert_tensors(arguments: Any, tensors: Sequence[Any]) -> Any:
    """Replace references by tensors."""
    if isinstance(arguments, _InputRef):
        return tensors[arguments.index]
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_insert_tensors(item, tensors) for item in arguments)
    if isinstance(arguments, dict):
        return {name: _insert_tensors(item, tensors) for name, item in arguments.items()}
    return arguments


def _collect_dependencies(results: Any) -> set[fx.Node]:
    """Return all nodes that the results depend on, the results included."""
    dependencies: set[fx.Node] = set()
    pending: list[fx.Node] = []
    fx.node.map_arg(results, pending.append)
    while pending:
        node = pending.pop()
        if node not in dependencies:
            dependencies.add(node)
            pending.extend(node.all_input_nodes)
    return dependencies


class _GraphWriter:
    """Writes a new graph node by node."""

    def __init__(
        self, old: fx.GraphModule, lowerings: Mapping[str, _Lowering], constants: fx.GraphModule | None
    ) -> None:
        self._old, self._lowerings, self._constants = old, lowerings, constants
        self._graph = fx.Graph()
        self._held: dict[str, Any] = {}
        self._values: dict[fx.Node, Any] = {}

    def write(self, keys: Mapping[fx.Node, str]) -> fx.GraphModule:
        """Copy the old graph, with the lowering in place of each call that has one."""
        for node in self._old.graph.nodes:
            lowering = self._lowerings.get(keys.get(node, ""))
            if lowering is not None:
                self._values[node] = self._inline(lowering, node)
            elif node.target is operator.getitem and isinstance(self._values[node.args[0]], (tuple, list)):
                self._values[node] = self._values[node.args[0]][node.args[1]]
            else:
                self._values[node] = self._copy_node(node, self._values, self._old, "")
        return _LazyGraphModule(self._held, self._graph)

    def _inline(self, lowering: _Lowering, node: fx.Node) -> Any:
        values = {given: self._values[old] for given, old in zip(lowering.inputs, node.all_input_nodes, strict=True)}
        for inner in lowering.nodes:
            values[inner] = self._copy_node(inner, values, self._constants, "_lowered")
        return fx.node.map_arg(lowering.results, lambda inner: values[inner])

    def _copy_node(self, node: fx.Node, values: Mapping[fx.Node, Any], owner: Any, prefix: str) -> fx.Node:
        if node.op == "call_function":
            arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            new = append_call(self._graph, node.target, arguments, options, node.name)
            new.meta.update(node.meta)
            return new
        new = self._graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            new.target = f"{prefix}{node.target}"
            self._held[new.target] = getattr(owner, str(node.target))
        return new


def trace(step: Step, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Trace a step with its shapes only, and remove what no result depends on.

    Args:
        step: the step to trace.
        table: lowerings, by operator.

    Returns:
        A graph module whose nodes carry a fake tensor of their shape and type in `meta["val"]`.

    Raises:
        ExportError: the step cannot be traced, for example because a layer depends on values; or it does something that
            no program can.
    """
    graph = lower_graph(canonical_graph(step), table)
    _copy_shared_results(graph)
    return graph


def canonical_graph(step: Step) -> fx.GraphModule:
    """Return a step as a graph in the form that `subfleet.export.canonical` describes.

    Raises:
        ExportError: as `trace`.
    """
    graph = capture_step(step)
    clean(graph)
    check_constants(graph, step.carried, step.held)
    fold_constants(graph)
    check_operators(graph)
    mask_before_pools(graph)
    far = find_unbounded(graph)
    if any(node.target in CHOSEN and node.args[0] in far for node in graph.graph.nodes):
        return lower_graph(graph, CHOSEN, lambda node: node.args[0] in far)
    return graph


def _copy_shared_results(graph: fx.GraphModule) -> None:
    """Copy results that are also inputs, and results given twice: a runtime may reuse the memory of one for another."""
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
    """Return the nodes of a traced graph's inputs, in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def results_of(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a traced graph's results, in order."""
    results: Any = graph.graph.output_node().args[0]
    return list(results)
