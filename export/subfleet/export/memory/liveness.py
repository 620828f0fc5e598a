"""A fast plan from a traced graph alone, to compare thousands of subnets before any of them is written.

It knows nothing of what a runtime makes of the graph, so it is a guide for a search; the plan in a program's manifest
comes from the written program (`onnx_plan`, `executorch_plan`).
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx

from subfleet.export.memory.values import fed_bytes, optimiser_bytes, weights_bytes
from subfleet.export.steps.values import Step
from subfleet.export.tracing import results_of
from subfleet.protocol.memory import MemoryPlan

__all__ = ["GIVEN_BACK", "activation_peak_bytes", "estimate", "graph_requests"]

aten = torch.ops.aten

GIVEN_BACK = -1
_NODE_BYTES = 4_450
"""A runtime's objects for one node of a graph. Measured with ONNX Runtime: 4.4 to 4.7 kB."""
_BASE_BYTES = 700_000
_SHARED = frozenset({aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, operator.getitem})
"""Operators whose result is their input's memory under another shape."""


def estimate(graph: fx.GraphModule, step: Step) -> MemoryPlan:
    """Estimate a traced step's memory, in milliseconds."""
    node_count = sum(node.op == "call_function" and node.target not in _SHARED for node in graph.graph.nodes)
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),
        activation_bytes=activation_peak_bytes(graph),
        runtime_bytes=_BASE_BYTES + _NODE_BYTES * node_count,
    )


def activation_peak_bytes(graph: fx.GraphModule) -> int:
    """The most bytes of intermediate results alive at once, in the graph's own order.

    Inputs and outputs are not counted: the caller holds them. A convolution also needs its patches of one sample.
    """
    sizes: dict[str, int] = {}
    alive = peak = 0
    for _, requests in graph_requests(graph):
        for name, size_bytes in requests:
            if size_bytes == GIVEN_BACK:
                alive -= sizes[name]
                continue
            sizes[name] = size_bytes
            alive += size_bytes
            peak = max(peak, alive)
    return peak


def graph_requests(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, tuple[tuple[str, int], ...]]]:
    """What each node takes and gives back (`GIVEN_BACK`), in order, by name."""
    results = set(results_of(graph))
    owners: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, int] = {}
    nodes = list(graph.graph.nodes)
    for place, node in enumerate(nodes):
        shares = node.op == "call_function" and node.target in _SHARED
        owners[node] = owners[node.args[0]] if shares else node
        for argument in (*node.all_input_nodes, node):
            last_use[owners[argument]] = place
    held = {owners[result] for result in results}
    for place, node in enumerate(nodes):
        counted = node.op == "call_function" and owners[node] is node and node not in held
        size_bytes, workspace_bytes = _node_bytes(node), _workspace_bytes(node)
        requests = [(node.name, size_bytes)] if counted and size_bytes else []
        if workspace_bytes:
            requests += [(f"{node.name}/", workspace_bytes), (f"{node.name}/", GIVEN_BACK)]
        for owner in dict.fromkeys(owners[argument] for argument in (*node.all_input_nodes, node)):
            if last_use[owner] == place and owner.op == "call_function" and owner not in held and _node_bytes(owner):
                requests.append((owner.name, GIVEN_BACK))
        yield node, tuple(requests)


def _node_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0  # a tuple of results, whose parts are counted where they are taken out
    return value.numel() * value.element_size()


def _workspace_bytes(node: fx.Node) -> int:
    """The patches of one sample that a convolution lays out for its matrix product."""
    if node.target is not aten.convolution.default:
        return 0
    inputs, weight = node.args[:2]
    if not isinstance(inputs, fx.Node) or not isinstance(weight, fx.Node):
        return 0
    positions_of = inputs if node.args[6] else node  # a transposed convolution unfolds what it is given
    kernel = weight.meta["val"].shape[1:].numel()
    return int(kernel * positions_of.meta["val"].shape[2:].numel() * 4)
