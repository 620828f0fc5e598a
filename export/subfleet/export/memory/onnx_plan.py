"""The memory plan of a training program in ONNX Runtime, from the graph that the runtime makes of it.

    weights and states   twice: a step reads one set and writes the other
    activations          most bytes of the step's own tensors alive at once, in the order in which the runtime runs them
    workspace            kernels' scratch memory, and the gaps between blocks, from a simulation of the runtime's arena
    runtime              the session's objects, counted in the C library's heap; the program; a constant

With planned reuse off, as trainers set it, the runtime takes a block for every value when its kernel asks for it, and
frees it after the last kernel that reads it. There is no block for a value that is its input with another shape, for
one that may overwrite an input that nothing else reads, or for the program's outputs, which the trainer allocates.

Scratch memory was found by recording what every operator requests, and agrees with the kernels' sources: `conv.cc`,
`conv_transpose.cc`, `where_op.cc`, `softmax.cc`, `element_wise_ops.cc`, and `convolve.cpp` of MLAS. Other kernels, such
as matrix products and reductions, work in their outputs and on the stack; two list indices in the heap, which keeps
that memory.

`benchmarks/plan_memory.py` compares plans with the memory of fresh processes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import onnx

from subfleet.export.memory.blocks import BlockRequest, KernelCall, blocks_of, peak_bytes
from subfleet.export.memory.onnx_arena import simulate_arena
from subfleet.export.memory.onnx_run import ExecutedGraph, TensorType, run_onnx
from subfleet.export.memory.step_bytes import fed_bytes, optimiser_bytes, round_up_count, weights_bytes
from subfleet.export.steps.step import Step
from subfleet.protocol.memory_plan import MemoryPlan

_FLOAT_BYTES = 4
_CONVOLUTION_BYTES = 65536
"""The part of a convolution's patches that one thread copies at a time."""


Scratch = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of the blocks that a kernel takes before its outputs and after them; it frees all of them when it ends."""
_NONE: Scratch = (), ()


def scratch_of(node: onnx.NodeProto, types: Mapping[str, TensorType]) -> Scratch:
    """Return the scratch memory of a node."""
    rule = _RULES.get(node.op_type)
    if rule is None:
        return _NONE
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    return rule(attributes, [types[name] for name in node.input if name], types[node.output[0]])


def _convolution(attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    x_shape, w_shape = inputs[0].shape, inputs[1].shape
    group = attributes.get("group", 1)
    filters, channels = w_shape[0] // group, w_shape[1]
    positions = math.prod(output.shape[2:])
    plain = all(step == 1 for step in attributes.get("strides", ())) and not any(attributes.get("pads", ()))
    if plain and math.prod(w_shape[2:]) == 1:
        return _NONE
    dense = all(step == 1 for step in attributes.get("dilations", ()))
    if plain and dense and channels == 1 and len(w_shape) == 4:
        whole_rows, whole_columns = w_shape[3] == x_shape[3], w_shape[2] == x_shape[2] and w_shape[3] == 1
        if whole_rows or whole_columns:
            return _NONE
    patches_bytes = _FLOAT_BYTES * positions * channels * math.prod(w_shape[2:])
    return (), (patches_bytes if filters > positions else _CONVOLUTION_BYTES,)


def _transposed(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], _output: TensorType) -> Scratch:
    x_shape, w_shape = inputs[0].shape, inputs[1].shape
    return (), (_FLOAT_BYTES * math.prod(w_shape[1:]) * math.prod(x_shape[2:]),)


def _where(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    condition, *branches = (entry.shape for entry in inputs)
    chosen = (output.item_bytes * math.prod(_broadcast(condition, branch)) for branch in branches)
    return tuple(chosen), ()


def _softmax(attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    if attributes.get("axis", -1) in (-1, len(inputs[0].shape) - 1):
        return _NONE
    return (), (output.size_bytes, output.size_bytes)


def _variadic(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    return (output.size_bytes,) * max(len(inputs) - 2, 0), ()


def _like_output(_attributes: Mapping[str, Any], _inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    return (), (output.size_bytes,)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(first), len(second))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (first, second))
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


_RULES: Mapping[str, Callable[[Mapping[str, Any], Sequence[TensorType], TensorType], Scratch]] = MappingProxyType(
    {
        "BiasGelu": _like_output,
        "Conv": _convolution,
        "ConvTranspose": _transposed,
        "FusedConv": _convolution,
        "LogSoftmax": _softmax,
        "Max": _variadic,
        "Min": _variadic,
        "Softmax": _softmax,
        "Sum": _variadic,
        "Where": _where,
    }
)


_INDEX_BYTES = 8


def list_heap_bytes(node: onnx.NodeProto, types: Mapping[str, TensorType]) -> int:
    """Return the bytes of the indices that a node's kernel lists, which it takes from the heap instead of the arena.

    `expand.cc` has one for each piece of its input that it copies as a whole, `scatter.cc` one for each update.
    """
    if node.op_type == "ScatterElements":
        return _INDEX_BYTES * math.prod(types[node.input[1]].shape)
    if node.op_type != "Expand":
        return 0
    given, expanded = (types[name].shape for name in (node.input[0], node.output[0]))
    given = (1,) * (len(expanded) - len(given)) + given
    repeated = [place for place, pair in enumerate(zip(given, expanded, strict=True)) if pair[0] != pair[1]]
    return _INDEX_BYTES * math.prod(given[: max(repeated) + 1]) if repeated else 0


_ALIASES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Kernels with their first input's memory as output."""
_IN_PLACE = frozenset({
    "Cast", "Celu", "Clip", "Elu", "HardSigmoid", "Identity", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements",
    "Selu", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
})  # fmt: skip
"""Kernels that may overwrite their first input if it is as large. Recorded: arithmetic on two inputs may not."""


def arena_requests(graph: ExecutedGraph) -> Iterator[BlockRequest]:
    """Return the requests of one run."""
    return chain.from_iterable(blocks_of(list(executed_calls(graph)), {value.name for value in graph.graph.output}))


def executed_calls(graph: ExecutedGraph) -> Iterator[KernelCall]:
    """Convert the nodes of a graph to calls of kernels."""
    for node in graph.graph.node:
        before_bytes, after_bytes = scratch_of(node, graph.types)
        yield KernelCall(
            inputs=tuple(filter(None, node.input)),
            outputs={name: graph.types[name].size_bytes for name in node.output if name},
            shares=node.op_type in _ALIASES,
            overwrites=tuple(node.input[:1]) if node.op_type in _IN_PLACE else (),
            before_bytes=before_bytes,
            after_bytes=after_bytes,
        )


TRAINING_BYTES = 500_000
"""Python's objects of a training, and pages of libraries that the first step maps. There is no second batch: a step's
inputs are freed before the next ones are created."""
FIRST_SESSION_BYTES = 45_000
"""Memory that a process takes once, with its first session. Measured: 36 to 48 kB."""
VALUE_BYTES = 1_800
"""Objects for each input and output. Measured, together with the above: 0.6 MB (31 values) to 1.4 MB (299 values)."""


def plan_onnx(body: bytes, step: Step) -> MemoryPlan:
    """Plan a program by loading it and running it once.

    Raises:
        ExportError: the runtime's report of the run cannot be read.
    """
    graph = run_onnx(body, step.inputs)
    requests = list(arena_requests(graph))
    activation = peak_bytes(
        request for request in requests if request[0] in graph.types
    )  # without kernels' scratch memory
    value_count = len(step.inputs) + len(step.outputs)
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),
        activation_bytes=activation,
        workspace_bytes=max(simulate_arena(requests).resident_bytes - activation, 0)
        + max((list_heap_bytes(node, graph.types) for node in graph.graph.node), default=0),
        runtime_bytes=round_up_count(graph.session_bytes)
        + len(body)
        + FIRST_SESSION_BYTES
        + TRAINING_BYTES
        + VALUE_BYTES * value_count,
    )
