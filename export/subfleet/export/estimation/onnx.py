"""What ONNX Runtime makes of a step: its own graph in its own order, without running it."""

from dataclasses import replace

import onnx

from subfleet.export.estimation.kernels import TracedProgram
from subfleet.export.memory.onnx_arena import simulate_arena
from subfleet.export.memory.onnx_blocks import calls_of
from subfleet.export.memory.onnx_plan import FIRST_SESSION_BYTES, TRAINING_BYTES, VALUE_BYTES
from subfleet.export.memory.onnx_run import read_onnx
from subfleet.export.steps.values import Step
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace

__all__ = ["onnx_program"]

_NODE_BYTES, _WRITTEN_BYTES = 2_500, 1_930
"""Of a session's objects, for a node that runs and for one of the program, which leaves something though it be fused
away. Of 23 networks, constants included, they tell 0.96 to 1.06 of what was counted."""
_PACKING = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedMatMul", "Gemm", "MatMul"})
"""Kernels that hold a constant second input once more, in an order of their own."""


def onnx_program(step: Step) -> TracedProgram:
    """Load the step's program, and read how the runtime would run it."""
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    graph = read_onnx(body)
    nodes, written = graph.graph.node, onnx.load_model_from_string(body).graph.node
    node_bytes = _NODE_BYTES + _WRITTEN_BYTES * len(written) // len(nodes)
    packed = {node.input[1] for node in nodes if node.op_type in _PACKING}
    constant_bytes = {
        initializer.name: graph.types[initializer.name].size_bytes * (1 + (initializer.name in packed))
        for initializer in graph.graph.initializer
    }
    calls = (
        replace(
            call, object_bytes=node_bytes, constant_bytes=sum(constant_bytes.pop(name, 0) for name in set(call.inputs))
        )
        for call in reversed([*calls_of(graph)])  # on the way back blocks that may be left out come first
    )
    return TracedProgram(
        calls=tuple(calls)[::-1],
        names={value.name: value.name for value in (*step.inputs, *step.outputs)},
        base_bytes=FIRST_SESSION_BYTES + TRAINING_BYTES + 2**15,  # half of the step in which plans count objects
        value_bytes=VALUE_BYTES,
        measure_arena=lambda requests: simulate_arena(requests).resident_bytes,
    )
