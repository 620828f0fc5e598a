"""Replaces regions of a graph by calls of ExecuTorch's XNNPACK delegate."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from subfleet.export.nodes import shape_of
from subfleet.export.targets.executorch_program import make_exported_program
from subfleet.export.targets.xnnpack.graph import XnnpackEmitter, XnnpackGraph
from subfleet.export.targets.xnnpack.operators import OPERATORS, is_supported
from subfleet.export.targets.xnnpack.preparing import prepare
from subfleet.export.targets.xnnpack.regions import DelegateRegion, split_regions

__all__ = ["delegate", "region_graph"]

aten = torch.ops.aten
_BACKEND = "XnnpackBackend"
_ALIGNMENT = 16


def region_graph(region: DelegateRegion) -> XnnpackGraph:
    """Return XNNPACK's graph of a region, with inputs and outputs in the region's order."""
    emitting = XnnpackEmitter()
    given = set()
    for node in region.inputs:
        value = emitting.graph.input(shape_of(node))
        given.add(value)
        emitting.bind(node, value)
    for node in region.nodes:
        emitting.bind(node, OPERATORS[node.target](emitting, node))
    for node in region.outputs:
        value = emitting.value(node)
        if value in given or emitting.graph.is_constant(value):
            value = emitting.graph.unary("Copy", value)
        given.add(value)
        emitting.graph.output(value)
    return emitting.graph


def _shape_program(region: DelegateRegion) -> ExportedProgram:
    """Return a program of the region's shapes: the delegate's call needs one, but nothing reads it."""
    graph = fx.Graph()
    for index, node in enumerate(region.inputs):
        graph.placeholder(f"x{index}").meta["val"] = _delegate_tensor(node)
    results = []
    for node in region.outputs:
        result = graph.call_function(aten.full.default, (list(_delegate_tensor(node).shape), 0.0))
        result.meta["val"] = _delegate_tensor(node)
        results.append(result)
    graph.output(tuple(results))
    return make_exported_program(fx.GraphModule(torch.nn.Module(), graph), {})


def _call(
    graph: fx.Graph, root: fx.GraphModule, name: str, region: DelegateRegion, seen: Mapping[fx.Node, fx.Node]
) -> Any:
    """Append the call of a region; return the nodes of its results."""
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.delegate import executorch_call_delegate
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    written = region_graph(region)
    root.meta["packed"] += written.packed
    body = written.serialise()
    store = NamedDataStore()
    for key, content in written.stored.items():
        store.add_named_data(key, content, _ALIGNMENT)
    lowered = LoweredBackendModule(_shape_program(region), _BACKEND, body, [], store.get_named_data_store_output())
    root.add_module(name, lowered)
    arguments = (graph.get_attr(name), *(_view_as(graph, seen[node], _delegate_tensor(node)) for node in region.inputs))
    call = graph.call_function(executorch_call_delegate, arguments)
    call.meta["val"] = tuple(_delegate_tensor(node) for node in region.outputs)
    results = []
    for index, node in enumerate(region.outputs):
        result = graph.call_function(operator.getitem, (call, index))
        result.meta["val"] = _delegate_tensor(node)
        results.append(_view_as(graph, result, node.meta["val"]))
    return results


def _copy_if_input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy a result that is an input: the runtime returns no inputs."""
    if node.op == "call_function":
        return node
    copy = graph.call_function(aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy


def _delegate_tensor(node: fx.Node) -> Tensor:
    """Return a node's tensor as the delegate takes it: with at least one dimension."""
    value: Tensor = node.meta["val"]
    return value if value.dim() else value.new_empty((1,))


def _view_as(graph: fx.Graph, node: fx.Node, like: Tensor) -> fx.Node:
    """View a tensor in another one's shape."""
    if node.meta["val"].shape == like.shape:
        return node
    view = graph.call_function(aten.view.default, (node, list(like.shape)))
    view.meta["val"] = like
    return view


def delegate(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that computes the same, with calls of the delegate for everything that XNNPACK can do.

    Its `meta["packed"]` lists the rows and columns of all constant factors of products.

    Args:
        graph: flat, of PyTorch's basic operators; it is changed.
    """
    prepare(graph)
    root = fx.GraphModule(torch.nn.Module(), fx.Graph())
    root.meta["packed"] = []
    new = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(node.target, getattr(graph, node.target))
        if node.op in {"placeholder", "get_attr"}:
            seen[node] = new.node_copy(node)
    for number, part in enumerate(split_regions(graph.graph, is_supported)):
        if isinstance(part, DelegateRegion):
            results = _call(new, root, f"xnnpack_{number}", part, seen)
            seen.update(zip(part.outputs, results, strict=True))
            continue
        for node in part:
            seen[node] = new.node_copy(node, lambda argument: seen[argument])
    outputs: Any = graph.graph.output_node().args[0]
    new.output(tuple(_copy_if_input(new, seen[node]) for node in outputs))
    root.graph = new
    return root
