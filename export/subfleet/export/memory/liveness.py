"""The memory of a traced graph in eager PyTorch, which runs its operators in order."""

import operator
from collections.abc import Sequence
from itertools import chain

import torch
from torch import fx

from subfleet.export.memory.blocks import KernelCall, blocks_of, peak_bytes
from subfleet.export.tracing import results_of

__all__ = ["activation_peak_bytes", "calls_of", "size_bytes_of"]

aten = torch.ops.aten

_SHARES = frozenset({aten.view.default, aten.unsqueeze.default, aten.squeeze.dims})
"""Operators that return their input's memory with another shape."""


def activation_peak_bytes(graph: fx.GraphModule) -> int:
    """Return the most bytes of intermediate results alive at once, in the graph's own order.

    Inputs and outputs are not counted, since the caller holds them. A convolution also needs the patches of one sample.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    blocks = blocks_of(calls_of(nodes), {node.name for node in results_of(graph)})
    return peak_bytes(chain.from_iterable(blocks))


def calls_of(nodes: Sequence[fx.Node]) -> tuple[KernelCall, ...]:
    """Convert nodes of a traced graph to calls of kernels."""
    return tuple(
        KernelCall(
            inputs=tuple(given.name for given in node.all_input_nodes),
            outputs=_outputs(node),
            shares=node.target in _SHARES,
            after_bytes=tuple(filter(None, [_workspace_bytes(node)])),
        )
        for node in nodes
    )


def size_bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's result; 0 for several results."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _outputs(node: fx.Node) -> dict[str, int]:
    """Return a node's results; several results are returned at once, named after the nodes that separate them."""
    if node.target is operator.getitem:
        return {}
    alone = isinstance(node.meta.get("val"), torch.Tensor)
    return {user.name: size_bytes_of(user) for user in ([node] if alone else node.users)}


def _workspace_bytes(node: fx.Node) -> int:
    """Return the size of the patches of one sample that a convolution copies for its matrix product."""
    if node.target is not aten.convolution.default:
        return 0
    inputs, weight = node.args[:2]
    if not isinstance(inputs, fx.Node) or not isinstance(weight, fx.Node):
        return 0
    positions_of = inputs if node.args[6] else node  # a transposed convolution unfolds what it is given
    kernel = weight.meta["val"].shape[1:].numel()
    return int(kernel * positions_of.meta["val"].shape[2:].numel() * 4)
