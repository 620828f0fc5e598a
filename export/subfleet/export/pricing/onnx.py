"""What ONNX Runtime makes of a step: its own graph in its own order, without running it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import helper, shape_inference

from subfleet.export.memory.onnx_arena import arena_after
from subfleet.export.memory.onnx_blocks import calls_of
from subfleet.export.memory.onnx_plan import FIRST_SESSION_BYTES, TRAINING_BYTES, VALUE_BYTES
from subfleet.export.memory.onnx_run import RanGraph, TensorType, ran_graph, session_options
from subfleet.export.pricing.kernels import Program
from subfleet.export.steps.values import Step
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace

__all__ = ["onnx_program"]

_NODE_BYTES, _WRITTEN_BYTES = 2_500, 1_930
"""Of a session's objects, for a node that runs and for one of the program, which leaves something though it be fused
away. Of 23 networks, constants included, they tell 0.96 to 1.06 of what was counted."""
_PACKING = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedMatMul", "Gemm", "MatMul"})
"""Kernels that hold a constant second input once more, in an order of their own."""
_ROUNDED_BYTES = 2**15
"""Half of the step in which plans count objects."""


def onnx_program(step: Step) -> Program:
    """Load the step's program, and read how the runtime would run it."""
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    model, graph = _read(body)
    written = onnx.load_model_from_string(body).graph.node
    node_bytes = _NODE_BYTES + _WRITTEN_BYTES * len(written) // len(graph.nodes)
    packed = {node.inputs[1] for node in graph.nodes if node.operator in _PACKING}
    left = {one.name: graph.types[one.name].size_bytes * (1 + (one.name in packed)) for one in model.graph.initializer}
    calls = []
    for call in calls_of(graph):
        constant_bytes = sum(left.pop(name, 0) for name in dict.fromkeys(call.inputs))
        calls.append(replace(call, constant_bytes=constant_bytes, object_bytes=node_bytes))
    return Program(
        calls=tuple(calls),
        names={value.name: value.name for value in (*step.inputs, *step.outputs)},
        base_bytes=FIRST_SESSION_BYTES + TRAINING_BYTES + _ROUNDED_BYTES,
        value_bytes=VALUE_BYTES,
        filled=lambda requests: arena_after(requests).resident_bytes,
    )


def _read(body: bytes) -> tuple[onnx.ModelProto, RanGraph]:
    """The graph that the runtime makes of a program, with what ONNX infers of its shapes."""
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = session_options()
        options.optimized_model_filepath = str(Path(folder) / "rewritten.onnx")
        onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        model = onnx.load_model(options.optimized_model_filepath)
    made = {name for node in model.graph.node for name in node.output}
    known = [value for value in _values(onnx.load_model_from_string(body)) if value.name in made]
    del model.graph.value_info[:]
    model.graph.value_info.extend(known)
    types = {value.name: _type(value.type.tensor_type) for value in _values(model)}
    for one in model.graph.initializer:
        types[one.name] = TensorType(item_bytes=_item_bytes(one.data_type), shape=tuple(one.dims))
    for node in model.graph.node:
        unknown = types.get(node.input[0]) if node.input else None
        for name in filter(None, node.output):
            types.setdefault(name, unknown or TensorType(item_bytes=0, shape=()))
    return model, ran_graph(model.graph, types)


def _values(model: onnx.ModelProto) -> Iterable[onnx.ValueInfoProto]:
    """The values of a graph whose shapes are known."""
    told = shape_inference.infer_shapes(model, data_prop=True).graph
    for value in (*told.input, *told.output, *told.value_info):
        told_type = value.type.tensor_type
        if told_type.HasField("shape") and all(dim.HasField("dim_value") for dim in told_type.shape.dim):
            yield value


def _type(told: onnx.TypeProto.Tensor) -> TensorType:
    shape = tuple(dim.dim_value for dim in told.shape.dim)
    return TensorType(item_bytes=_item_bytes(told.elem_type), shape=shape)


def _item_bytes(element_type: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(element_type).itemsize)
