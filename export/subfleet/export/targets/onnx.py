"""Programs for standard ONNX Runtime: the lowered graph, translated node by node."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx

from subfleet.export.lowerings.convolution import CONVOLUTIONS_AS_CONVOLUTIONS
from subfleet.export.lowerings.tables import COMMON, without
from subfleet.export.memory.onnx_plan import plan_onnx
from subfleet.export.steps.step import Step
from subfleet.export.targets.base import WrittenProgram
from subfleet.export.targets.instead import instead_of
from subfleet.export.targets.onnx_fusions import FUSIONS
from subfleet.export.targets.onnx_operators import OPERATORS, Emitter
from subfleet.export.tracing import inputs_of, results_of
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.silence import imported

__all__ = ["IR_VERSION", "OPSET", "OnnxTarget", "add_notes", "training_model"]

OPSET = 20
IR_VERSION = 10
"""What onnxruntime 1.23, the last for Python 3.10, still reads with room to spare."""

_ELEMENT_TYPES: Mapping[str, int] = MappingProxyType({"F32": onnx.TensorProto.FLOAT, "I64": onnx.TensorProto.INT64})


_LOWERINGS = without(COMMON, torch.ops.aten.native_layer_norm.default, torch.ops.aten.hardsigmoid.default)
"""The runtime has kernels for the operators that are left out."""


class OnnxGraph:
    """An ONNX graph in the making: the nodes so far, the constants, and the name of each fx node's value."""

    def __init__(self, fusions: Mapping[Any, Callable[[Emitter, Any], str | None]] = MappingProxyType({})) -> None:
        self._fusions = fusions
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._names: dict[fx.Node, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def bind(self, node: fx.Node, name: str) -> None:
        """Give an fx node's value its name."""
        self._names[node] = name

    def add(
        self, operator: str, *inputs: str, output: fx.Node | None = None, outputs: Sequence[str] = (), **attributes: Any
    ) -> str:
        """Append a node; the name of its first output."""
        self._count += 1
        names = list(outputs) or [f"v{self._count}" if output is None else output.name]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=f"n{self._count}", **attributes))
        return names[0]

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """The name of a node's value or of a number, converted where its type differs."""
        if not isinstance(argument, fx.Node):
            return self.constant(torch.tensor(argument, dtype=dtype).numpy())
        name = self._names[argument]
        if dtype is None or argument.meta["val"].dtype == dtype:
            return name
        return self.add("Cast", name, to=helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype))

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """The name of a constant; equal ones are written once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"c{len(self._constants)}"
            self._constants[key] = name
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return self._constants[key]

    def translate(self, graph: fx.GraphModule) -> tuple[list[fx.Node], list[str]]:
        """Append every node of a traced graph; its result nodes, and the names of their values."""
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.bind(node, self.constant(getattr(graph, node.target).detach().numpy()))
            elif node.op == "call_function":
                self.bind(node, self._translate(node))
        results = results_of(graph)
        return results, [self._names[result] for result in results]

    def name_results(self, names: Mapping[str, str]) -> None:
        """Give results the names they are to have: new name to old."""
        computed = {name for node in self.nodes for name in node.output}
        new_names: dict[str, str] = {}
        copies = []
        for new, old in names.items():
            if old in computed and old not in new_names:
                new_names[old] = new
            else:  # An input or a constant, or one value that is two results.
                copies.append(helper.make_node("Identity", [new_names.get(old, old)], [new]))
        for node in self.nodes:
            for given in (node.input, node.output):
                given[:] = [new_names.get(name, name) for name in given]
        # The runtime would copy what is both a result and read by other nodes, were the result a name of its own.
        self.nodes.extend(copies)

    def _translate(self, node: fx.Node) -> str:
        fusion = self._fusions.get(node.target)
        fused = None if fusion is None else fusion(self, node)
        if fused is not None:
            return fused
        translation = OPERATORS.get(node.target)
        if translation is None:
            raise ExportError(
                f"{node.target} (node {node.name!r}) cannot be translated to ONNX; {instead_of(node.target)}"
            )
        return translation(self, node)


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


def _finish(graph: OnnxGraph, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> bytes:
    nodes = _select_needed(graph.nodes, [output.name for output in outputs])
    read = {name for node in nodes for name in node.input}
    constants = [constant for constant in graph.initializers if constant.name in read]
    model = helper.make_model(
        helper.make_graph(nodes, "step", inputs, outputs, initializer=constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
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
    written = OnnxGraph(FUSIONS)
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


def _free_values(step: Step) -> tuple[ValueInfo, ValueInfo]:
    """Return what an inference step takes besides weights, and what it returns."""
    return step.inputs[0], step.outputs[0]


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
        written = OnnxGraph()
        places = inputs_of(graph)
        written.bind(places[0], step.inputs[0].name)
        for node, value, weight in zip(places[1:], step.inputs[1:], weights, strict=True):
            array = np.ascontiguousarray(weight.detach().numpy()).reshape(value.shape)
            written.initializers.append(numpy_helper.from_array(array, value.name))
            written.bind(node, value.name)
        _, names = written.translate(graph)
        written.nodes.append(helper.make_node("Identity", names, [step.outputs[0].name]))
        free = [(value, ["batch" if any_batch else value.shape[0], *value.shape[1:]]) for value in _free_values(step)]
        inputs, outputs = ([_value_info(value, shape)] for value, shape in free)
        return add_notes(_finish(written, inputs, outputs), notes)

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program once; see `Target`."""
        onnxruntime = imported("onnxruntime")

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        results = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return tuple(torch.from_numpy(np.asarray(result)) for result in results)
