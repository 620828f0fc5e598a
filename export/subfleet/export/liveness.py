"""How much memory a program needs at once: what the caller holds, what lives inside, and what the runtime adds.

The runtime's part is calibrated: `benchmarks/plan_memory.py` measures the growth of fresh processes, and
`benchmarks/results/plan-memory.md` shows it beside these plans.
"""

import operator
from collections.abc import Iterable

import torch
from torch import fx

from subfleet.export.steps.values import Step
from subfleet.export.tracing import results_of
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.tensors import DTYPE_BYTES

__all__ = [
    "activation_peak_bytes",
    "caller_bytes",
    "executorch_planned_peak_bytes",
    "onnx_planned_peak_bytes",
]

aten = torch.ops.aten

_ONNX_BASE_BYTES = 4_700_000
_ONNX_BYTES_PER_PROGRAM_BYTE = 75
"""The session's parsed and optimised graph, its kernels and its execution plan."""
_ONNX_HELD_FACTOR = 1.3
_ONNX_ACTIVATION_FACTOR = 2.1
"""The arena rounds up and leaves gaps, and the runtime orders operators its own way. Measured: 1.8 to 2.1."""

_EXECUTORCH_BASE_BYTES = 6_400_000
_EXECUTORCH_BYTES_PER_PROGRAM_BYTE = 12
"""The program itself, its packed form, and the method's table of values and operators."""
_EXECUTORCH_ARENA_FACTOR = 1.38
"""Kernels pack what they multiply, beside the arena. Measured: 1.0 to 1.35."""


def _value_bytes(values: Iterable[ValueInfo]) -> int:
    total = 0
    for value in values:
        count = 1
        for size in value.shape:
            count *= size
        total += count * DTYPE_BYTES[value.dtype]
    return total


def caller_bytes(step: Step) -> int:
    """What the trainer holds while a step runs: its inputs and its outputs, so weights and states twice."""
    return _value_bytes(step.inputs) + _value_bytes(step.outputs)


def _node_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0  # a tuple of results, whose parts are counted where they are taken out
    return value.numel() * value.element_size()


_SHARED = frozenset({aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, operator.getitem})
"""Operators whose result is their input's memory under another shape."""


def activation_peak_bytes(graph: fx.GraphModule) -> int:
    """The most bytes of intermediate results alive at once, in the graph's own order.

    Inputs and outputs are not counted: the caller holds them. A convolution also needs its patches of one sample.
    """
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
    alive = peak = 0
    for place, node in enumerate(nodes):
        counted = node.op == "call_function" and owners[node] is node and node not in held
        alive += _node_bytes(node) if counted else 0
        peak = max(peak, alive + _workspace_bytes(node))
        for owner in {owners[argument] for argument in (*node.all_input_nodes, node)}:
            if last_use[owner] == place and owner.op == "call_function" and owner not in held:
                alive -= _node_bytes(owner)
    return peak


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


def onnx_planned_peak_bytes(graph: fx.GraphModule, step: Step, *, program_bytes: int) -> int:
    """The growth of a device's process over loading a training program in onnxruntime and running its steps.

    The runtime keeps its own copy of the outputs beside those that it gives to the caller.
    """
    runtime = _ONNX_BASE_BYTES + _ONNX_BYTES_PER_PROGRAM_BYTE * program_bytes
    held = caller_bytes(step) + _value_bytes(step.outputs)
    return int(runtime + _ONNX_HELD_FACTOR * held + _ONNX_ACTIVATION_FACTOR * activation_peak_bytes(graph))


def executorch_planned_peak_bytes(step: Step, *, arena_bytes: int, program_bytes: int) -> int:
    """The same for ExecuTorch, whose own memory plan gives the size of everything that lives inside."""
    runtime = _EXECUTORCH_BASE_BYTES + _EXECUTORCH_BYTES_PER_PROGRAM_BYTE * program_bytes
    return int(runtime + caller_bytes(step) + _EXECUTORCH_ARENA_FACTOR * arena_bytes)
