"""Runs a program in ONNX Runtime to see the graph after the runtime's own rewriting, in the order of execution.

The runtime fuses, drops and reorders nodes when it loads a program, so the written graph says little about memory. It
can save its own graph, with nodes in the order of execution, and report what ran, with all shapes. Two sessions with
the device's settings do one each, and the second runs the program once.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from subfleet.export.memory.heap import heap_bytes
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.silence import import_silently

_ERRORS_ONLY = 3
_KERNEL = "_kernel_time"
_NUMPY: Mapping[str, type[np.generic]] = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
_BYTES_PER_PROGRAM_BYTE = 65
"""Bytes of a session's objects per byte of its program, for C libraries that do not count them. Measured: 61 to 71."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """The size of an item, and the shape."""

    item_bytes: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedGraph:
    """A graph as it runs.

    Attributes:
        graph: with its nodes in the order of execution.
        types: the type of every value, by name.
        session_bytes: heap memory of the session, without the tensors of a run; 0 if it was not counted.
    """

    graph: onnx.GraphProto
    types: Mapping[str, TensorType]
    session_bytes: int = 0


def session_options() -> Any:
    """Return the options that affect memory, as a device's trainer sets them (`subfleet.trainers.onnx_sessions`)."""
    onnxruntime = import_silently("onnxruntime")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run_onnx(body: bytes, inputs: Sequence[ValueInfo]) -> ExecutedGraph:
    """Load a program as a device does, and run it once on zeros.

    Raises:
        ExportError: the runtime reports another graph than the one that it saved.
    """
    onnxruntime = import_silently("onnxruntime")

    with TemporaryDirectory() as folder:
        path, provider = Path(folder) / "rewritten.onnx", ["CPUExecutionProvider"]
        writing, counted = session_options(), session_options()
        writing.optimized_model_filepath = str(path)
        counted.enable_profiling = True
        counted.profile_file_prefix = str(Path(folder) / "run")
        # The first session of a process takes memory for all later ones, which is not the program's, and a session that
        # writes its graph keeps a copy of folded constants.
        onnxruntime.InferenceSession(body, writing, providers=provider)
        before = heap_bytes()
        session = onnxruntime.InferenceSession(body, counted, providers=provider)
        after = heap_bytes()
        session.run(None, {value.name: np.zeros(value.shape, _NUMPY[value.dtype]) for value in inputs})
        events = json.loads(Path(session.end_profiling()).read_bytes())
        rewritten = onnx.load_model(path)
    _sort_by_execution(rewritten.graph, events)
    heap_bytes_taken = _BYTES_PER_PROGRAM_BYTE * len(body) if before is None or after is None else after - before
    types = _read_types(rewritten.graph, events)
    return ExecutedGraph(graph=rewritten.graph, types=types, session_bytes=max(heap_bytes_taken, 0))


def read_onnx(body: bytes) -> ExecutedGraph:
    """Load a program as a device does, and infer its shapes without running it.

    A value without an inferred shape is assumed to be like its node's first input.
    """
    onnxruntime = import_silently("onnxruntime")

    with TemporaryDirectory() as folder:
        options = session_options()
        options.optimized_model_filepath = str(Path(folder) / "rewritten.onnx")
        onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        model = onnx.load_model(options.optimized_model_filepath)
    computed = {name for node in model.graph.node for name in node.output}
    known = [value for value in _inferred_values(onnx.load_model_from_string(body)) if value.name in computed]
    del model.graph.value_info[:]
    model.graph.value_info.extend(known)
    types = {
        initializer.name: _tensor_type(initializer.data_type, initializer.dims)
        for initializer in model.graph.initializer
    }
    for value in _inferred_values(model):
        tensor = value.type.tensor_type
        types[value.name] = _tensor_type(tensor.elem_type, (dim.dim_value for dim in tensor.shape.dim))
    for node in model.graph.node:
        unknown = types.get(node.input[0]) if node.input else None
        for name in filter(None, node.output):
            types.setdefault(name, unknown or TensorType(item_bytes=0, shape=()))
    return ExecutedGraph(graph=model.graph, types=types)


def _inferred_values(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the values of a graph with known shapes."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            yield value


def _sort_by_execution(graph: onnx.GraphProto, events: Sequence[Mapping[str, Any]]) -> None:
    """Sort the nodes by execution: the runtime saves nodes that it did not rewrite in the order of our file."""
    ran = [event["name"].removesuffix(_KERNEL) for event in events if _is_run(event)]
    order = {name: index for index, name in enumerate(ran)}
    nodes = list(graph.node)
    # A graph with loops, where inner nodes ran more than once, was rewritten: it is already in order.
    if len(order) == len(ran) and all(node.name in order for node in nodes):
        del graph.node[:]
        graph.node.extend(sorted(nodes, key=lambda node: order[node.name]))


def _is_run(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports a kernel that ran."""
    return event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL)


def _read_types(graph: onnx.GraphProto, events: Sequence[Mapping[str, Any]]) -> Mapping[str, TensorType]:
    types: dict[str, TensorType] = {}
    ran = (event for event in events if _is_run(event))
    for node, event in _pair_events(graph.node, ran):
        for names, field in ((node.input, "input_type_shape"), (node.output, "output_type_shape")):
            for name, reported in zip(filter(None, names), event["args"][field], strict=False):
                ((dtype, shape),) = reported.items()
                types[name] = _tensor_type(onnx.TensorProto.DataType.Value(dtype.upper()), shape)
    return types


def _tensor_type(element_type: int, shape: Iterable[int]) -> TensorType:
    item_bytes = int(helper.tensor_dtype_to_np_dtype(element_type).itemsize)
    return TensorType(item_bytes=item_bytes, shape=tuple(shape))


def _pair_events(
    nodes: Sequence[onnx.NodeProto], events: Iterator[Mapping[str, Any]]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, Any]]]:
    """Pair each node with the report of its run; reports of nodes inside other nodes lie in between."""
    for node in nodes:
        for event in events:
            name = event["name"].removesuffix(_KERNEL)
            if event["args"]["op_name"] == node.op_type and node.name in ("", name):
                yield node, event
                break
        else:
            raise ExportError(
                f"onnxruntime did not report that node {node.name!r} ({node.op_type}) ran; plan with another version"
            )
