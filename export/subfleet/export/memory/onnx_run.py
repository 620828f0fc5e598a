"""What ONNX Runtime really does with a program: the graph after its own rewriting, in the order in which it ran.

The runtime fuses, drops and reorders nodes when it loads a program, so the written graph says little about memory. It
can save the graph that it made of it, whose nodes stand in the order of execution, and report what ran, with every
shape. Both come from one session with the device's settings, which runs the program once.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper

from subfleet.export.memory.heap import heap_bytes
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

__all__ = ["RanGraph", "RanNode", "TensorType", "ran_graph", "run_onnx", "session_options"]

_ERRORS_ONLY = 3
_KERNEL = "_kernel_time"
_ITEM_BYTES: Mapping[str, int] = {
    "float": 4,
    "double": 8,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint64": 8,
    "uint32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_NUMPY: Mapping[str, type[np.generic]] = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
_BYTES_PER_PROGRAM_BYTE = 65
"""Of a session's objects, where the C library does not count them. Measured: 61 to 71."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Size of an item, and how many there are along each axis."""

    item_bytes: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanNode:
    """One kernel that ran; absent inputs and outputs have an empty name."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanGraph:
    """A graph as it ran.

    Attributes:
        nodes: in order.
        results: names of the outputs, which the caller holds.
        types: of every value, by name.
        session_bytes: what the session took from the heap when it was made, beside the tensors of a run; 0 where none
            was counted.
    """

    nodes: tuple[RanNode, ...]
    results: frozenset[str]
    types: Mapping[str, TensorType]
    session_bytes: int


def session_options() -> Any:
    """The options that decide over memory, as a device's trainer sets them (`subfleet.trainers.onnx`)."""
    import onnxruntime

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


def run_onnx(body: bytes, inputs: Sequence[ValueInfo]) -> RanGraph:
    """Load a program as a device does, and run it once on zeros.

    Raises:
        ExportError: the runtime reports another graph than the one that it saved.
    """
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = session_options()
        options.optimized_model_filepath = str(Path(folder) / "rewritten.onnx")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")
        # What the first session of a process takes for all later ones is no program's.
        onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        before = heap_bytes()
        session = onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        after = heap_bytes()
        session.run(None, {value.name: np.zeros(value.shape, _NUMPY[value.dtype]) for value in inputs})
        events = json.loads(Path(session.end_profiling()).read_bytes())
        rewritten = onnx.load_model(options.optimized_model_filepath)
    taken = _BYTES_PER_PROGRAM_BYTE * len(body) if before is None or after is None else after - before
    return ran_graph(rewritten.graph, _types(rewritten.graph, events), max(taken, 0))


def ran_graph(graph: onnx.GraphProto, types: Mapping[str, TensorType], session_bytes: int = 0) -> RanGraph:
    """A graph whose values' types are known, as it ran or would run."""
    return RanGraph(
        nodes=tuple(
            RanNode(
                operator=node.op_type,
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                attributes={entry.name: helper.get_attribute_value(entry) for entry in node.attribute},
            )
            for node in graph.node
        ),
        results=frozenset(value.name for value in graph.output),
        types=types,
        session_bytes=session_bytes,
    )


def _types(graph: onnx.GraphProto, events: Sequence[Mapping[str, Any]]) -> Mapping[str, TensorType]:
    types: dict[str, TensorType] = {}
    ran = (event for event in events if event.get("cat") == "Node" and event["name"].endswith(_KERNEL))
    for node, event in _pairs(graph.node, ran):
        for names, found in ((node.input, "input_type_shape"), (node.output, "output_type_shape")):
            present = [name for name in names if name]
            types.update(zip(present, map(_tensor_type, event["args"][found]), strict=False))
    return types


def _pairs(
    nodes: Sequence[onnx.NodeProto], events: Iterator[Mapping[str, Any]]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, Any]]]:
    """Each node with the report of its run; reports of nodes inside other nodes' bodies lie between them."""
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


def _tensor_type(reported: Mapping[str, Sequence[int]]) -> TensorType:
    ((dtype, shape),) = reported.items()
    return TensorType(item_bytes=_ITEM_BYTES.get(dtype, 8), shape=tuple(shape))
