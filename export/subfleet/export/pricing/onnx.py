"""What ONNX Runtime makes of a step: its own graph in its own order, without running it."""

import math
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import helper, shape_inference

from subfleet.export.memory.blocks import Call
from subfleet.export.memory.onnx_arena import arena_after
from subfleet.export.memory.onnx_blocks import ALIASES, IN_PLACE
from subfleet.export.memory.onnx_plan import FIRST_SESSION_BYTES, TRAINING_BYTES, VALUE_BYTES
from subfleet.export.memory.onnx_run import session_options
from subfleet.export.pricing.kernels import Program
from subfleet.export.steps.values import Step
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace

__all__ = ["onnx_program"]

_NODE_BYTES, _CONSTANT_BYTES = 4_580, 2_500
"""Of a session's objects and of the program for a node, and beside its numbers for a constant. Of 20 networks they tell
0.88 to 1.06 of what was counted, but 0.78 of DS-CNN as published; the same networks helped to choose them."""
_ROUNDED_BYTES = 2**15
"""Half of the step in which plans count objects."""


def onnx_program(step: Step) -> Program:
    """Load the step's program, and read how the runtime would run it."""
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    model = _rewritten(body)
    sizes = _sizes_bytes(model, _values(onnx.load_model_from_string(body), ()))
    left = {one.name: _item_bytes(one.data_type) * math.prod(one.dims) for one in model.graph.initializer}
    calls = []
    for node in model.graph.node:
        given = tuple(filter(None, node.input))
        new_bytes = [left.pop(name) for name in dict.fromkeys(given) if name in left]
        unknown = sizes.get(given[0], 0) if given else 0  # where no shape is inferred it is taken to be the input's
        calls.append(
            Call(
                inputs=given,
                outputs={name: sizes.setdefault(name, unknown) for name in filter(None, node.output)},
                shares=node.op_type in ALIASES,
                overwrites=node.op_type in IN_PLACE,
                constant_bytes=sum(new_bytes),
                object_bytes=_NODE_BYTES + _CONSTANT_BYTES * len(new_bytes),
            )
        )
    return Program(
        calls=tuple(calls),
        names={value.name: value.name for value in (*step.inputs, *step.outputs)},
        base_bytes=FIRST_SESSION_BYTES + TRAINING_BYTES + _ROUNDED_BYTES,
        value_bytes=VALUE_BYTES,
        filled=lambda requests: arena_after(requests).resident_bytes,
    )


def _rewritten(body: bytes) -> onnx.ModelProto:
    """The graph that the runtime makes of a program, whose nodes stand in the order of execution."""
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = session_options()
        options.optimized_model_filepath = str(Path(folder) / "rewritten.onnx")
        onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        return onnx.load_model(options.optimized_model_filepath)


def _values(model: onnx.ModelProto, known: Iterable[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """The values of a graph with a known shape, among them those that ONNX infers."""
    made = {name for node in model.graph.node for name in node.output}
    del model.graph.value_info[:]
    model.graph.value_info.extend(value for value in known if value.name in made)
    told = shape_inference.infer_shapes(model, data_prop=True).graph
    every = (
        value for value in (*told.input, *told.output, *told.value_info) if value.type.tensor_type.HasField("shape")
    )
    return [value for value in every if all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)]


def _sizes_bytes(model: onnx.ModelProto, known: Iterable[onnx.ValueInfoProto]) -> dict[str, int]:
    types = {value.name: value.type.tensor_type for value in _values(model, known)}
    return {
        name: _item_bytes(one.elem_type) * math.prod(dim.dim_value for dim in one.shape.dim)
        for name, one in types.items()
    }


def _item_bytes(element_type: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(element_type).itemsize)
