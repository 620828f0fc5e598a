"""Programs for standard ONNX Runtime: the lowered graph, translated node by node.

Small groups of operators that ONNX has one operator with a fast kernel for are fused first. A fusion looks at a node
and its inputs, and either writes the single operator or returns None. Inputs that are no longer read were already
written; the writer drops what nothing depends on.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx

from subfleet.export.lowerings.convolution import CONVOLUTIONS_AS_CONVOLUTIONS
from subfleet.export.lowerings.tables import COMMON, remove_operators
from subfleet.export.memory.onnx_plan import plan_onnx
from subfleet.export.nodes import shape_of
from subfleet.export.steps.step import Step
from subfleet.export.targets.base import WrittenProgram
from subfleet.export.targets.onnx_operators import OPERATORS, Emitter
from subfleet.export.targets.onnx_operators.emitting import NUMPY_TYPES, dtype_of, ints
from subfleet.export.tracing import inputs_of
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.silence import import_silently

aten = torch.ops.aten
_LEAST_POSITIONS = 8
"""With fewer positions in a channel, the kernel for affine maps spends its time between channels (measured)."""


def _is(node: Any, *operators: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in operators


def _affine(emitter: Emitter, node: Any) -> str | None:
    """Fuse one scale and one offset for each channel, or each sample's channel, into one pass instead of two."""
    product, offset = node.args[:2]
    if not (_is(product, aten.mul.Tensor) and len(product.users) == 1 and node.kwargs.get("alpha", 1) == 1):
        return None
    x, scale = product.args
    if not all(isinstance(part, fx.Node) for part in (x, scale, offset)) or dtype_of(node) != torch.float32:
        return None
    shape = shape_of(node)
    if len(shape) != 3 or shape_of(x) != shape or shape[2] < _LEAST_POSITIONS:
        return None
    if not all(shape_of(part) in {(1, shape[1], 1), (*shape[:2], 1)} for part in (scale, offset)):
        return None
    count = shape[1] if shape_of(scale) == shape_of(offset) == (1, shape[1], 1) else shape[0] * shape[1]
    parts = [_per_row(emitter, part, shape, count) for part in (scale, offset)]
    if node.target is aten.sub.Tensor:
        parts[1] = emitter.add("Neg", parts[1])
    still = [emitter.constant(np.full(count, value, dtype=NUMPY_TYPES[torch.float32])) for value in (0.0, 1.0)]
    name = emitter.value(x)
    if count == shape[1]:
        return emitter.add("BatchNormalization", name, *parts, *still, output=node, epsilon=0.0)
    rows = emitter.add("Reshape", name, ints(emitter, [1, count, shape[2]]))
    mapped = emitter.add("BatchNormalization", rows, *parts, *still, epsilon=0.0)
    return emitter.add("Reshape", mapped, ints(emitter, shape), output=node)


def _per_row(emitter: Emitter, part: fx.Node, shape: tuple[int, ...], count: int) -> str:
    """Return one number for each of `count` rows."""
    name = emitter.value(part)
    if shape_of(part)[0] == 1 and count != shape[1]:
        name = emitter.add("Expand", name, ints(emitter, [*shape[:2], 1]))
    return emitter.add("Reshape", name, ints(emitter, [count]))


def _ramp(emitter: Emitter, node: Any) -> str | None:
    """Fuse a ramp from 0 to 1: x * slope, or x * slope + start, clamped to these bounds."""
    x, *bounds = node.args
    if bounds != [0.0, 1.0] or not isinstance(x, fx.Node) or len(x.users) != 1:
        return None
    start: Any = 0.0
    if _is(x, aten.add.Tensor) and isinstance(x.args[1], int | float) and not x.kwargs:
        x, start = x.args
    if not (_is(x, aten.mul.Tensor) and isinstance(x.args[1], int | float) and len(x.users) == 1):
        return None
    x, slope = x.args
    return emitter.add("HardSigmoid", emitter.value(x), output=node, alpha=float(slope), beta=float(start))


def _fuse_padding(emitter: Emitter, node: Any) -> str | None:
    """Fuse a convolution with the zero padding of its input."""
    padded, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or not _is(padded, aten.constant_pad_nd.default) or len(padded.users) != 1:
        return None
    x, amounts, *number = padded.args
    dims = len(stride)
    if (number and number[0] != 0) or min(amounts) < 0 or any(amounts[2 * dims :]):
        return None
    amounts = [*amounts, *[0] * (2 * dims - len(amounts))]
    before, after = (amounts[side : 2 * dims : 2][::-1] for side in (0, 1))
    names = [emitter.value(part) for part in (x, weight, bias) if part is not None]
    return emitter.add(
        "Conv",
        *names,
        output=node,
        strides=list(stride),
        pads=[
            own + added
            for amounts_of_side in (before, after)
            for own, added in zip(padding, amounts_of_side, strict=True)
        ],
        dilations=list(dilation),
        group=groups,
        kernel_shape=list(shape_of(weight)[2:]),
    )


_FUSIONS: Mapping[Any, Callable[[Emitter, Any], str | None]] = MappingProxyType(
    {
        aten.add.Tensor: _affine,
        aten.sub.Tensor: _affine,
        aten.clamp.default: _ramp,
        aten.convolution.default: _fuse_padding,
    }
)


_OPSET = 20
_IR_VERSION = 10
"""What onnxruntime 1.23, the last for Python 3.10, still reads with room to spare."""

_ELEMENT_TYPES: Mapping[str, int] = MappingProxyType({"F32": onnx.TensorProto.FLOAT, "I64": onnx.TensorProto.INT64})


_LOWERINGS = remove_operators(COMMON, torch.ops.aten.native_layer_norm.default, torch.ops.aten.hardsigmoid.default)
"""The runtime has kernels for the operators that are left out."""


def _select_needed(nodes: Sequence[onnx.NodeProto], results: Sequence[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the results depend on, in order."""
    names, selected = set(results), []
    for node in reversed(nodes):
        if names.intersection(node.output):
            selected.append(node)
            names.update(node.input)
    return selected[::-1]


def _value_info(value: ValueInfo, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, _ELEMENT_TYPES[value.dtype], shape)


def _finish(graph: Emitter, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> bytes:
    nodes = _select_needed(graph.nodes, [output.name for output in outputs])
    read = {name for node in nodes for name in node.input}
    constants = [constant for constant in graph.initializers if constant.name in read]
    model = helper.make_model(
        helper.make_graph(nodes, "step", inputs, outputs, initializer=constants),
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="subfleet",
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the written ONNX graph is not valid: {error}; report it with the request") from error
    return bytes(model.SerializeToString(deterministic=True))


def training_model(graph: fx.GraphModule, step: Step) -> bytes:
    """Return the ONNX model of a traced training step, with fixed sizes.

    Raises:
        ExportError: an operator cannot be written.
    """
    written = Emitter(OPERATORS, _FUSIONS)
    for node, value in zip(inputs_of(graph), step.inputs, strict=True):
        written.bind(node, value.name)
    _, names = written.translate(graph)
    written.name_results(dict(zip((value.name for value in step.outputs), names, strict=True)))
    return _finish(
        written,
        [_value_info(value, value.shape) for value in step.inputs],
        [_value_info(value, value.shape) for value in step.outputs],
    )


def add_notes(body: bytes, notes: Mapping[str, str]) -> bytes:
    """Return a model with notes as metadata."""
    if not notes:
        return body
    model = onnx.load_model_from_string(body)
    helper.set_model_props(model, dict(notes))
    return bytes(model.SerializeToString(deterministic=True))


def _operators_in(body: bytes) -> tuple[str, ...]:
    """Return the operators of a model, with the name of their domain if it is not ONNX's own."""
    nodes = onnx.load_model_from_string(body).graph.node
    return tuple(sorted({f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in nodes}))


class OnnxTarget:
    """The ONNX format, opset 20 and IR 10."""

    name: ClassVar[str] = "onnx"
    lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
        {**_LOWERINGS, **CONVOLUTIONS_AS_CONVOLUTIONS}
    )
    inference_lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = _LOWERINGS
    inference_batch_size: ClassVar[int] = 2
    any_inference_batch: ClassVar[bool] = True

    def write_training(self, graph: fx.GraphModule, step: Step) -> WrittenProgram:
        """Write a training step; see `Target`."""
        body = training_model(graph, step)
        return WrittenProgram(body=body, memory=plan_onnx(body, step), operators=_operators_in(body))

    def write_inference(
        self,
        graph: fx.GraphModule,
        step: Step,
        weights: Sequence[Tensor],
        *,
        any_batch: bool,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Write an inference step; see `Target`."""
        written = Emitter(OPERATORS)
        places = inputs_of(graph)
        written.bind(places[0], step.inputs[0].name)
        for node, value, weight in zip(places[1:], step.inputs[1:], weights, strict=True):
            array = np.ascontiguousarray(weight.detach().numpy()).reshape(value.shape)
            written.initializers.append(numpy_helper.from_array(array, value.name))
            written.bind(node, value.name)
        _, names = written.translate(graph)
        written.nodes.append(helper.make_node("Identity", names, [step.outputs[0].name]))
        free = [
            (value, ["batch" if any_batch else value.shape[0], *value.shape[1:]])
            for value in (step.inputs[0], step.outputs[0])
        ]
        inputs, outputs = ([_value_info(value, shape)] for value, shape in free)
        return add_notes(_finish(written, inputs, outputs), notes)

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program once; see `Target`."""
        onnxruntime = import_silently("onnxruntime")

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        results = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return tuple(torch.from_numpy(np.asarray(result)) for result in results)
