"""The requests that one run of a program makes of ONNX Runtime's arena, in order.

With planned reuse off, as trainers set it, the runtime takes a block for every value when its kernel asks for it and
gives it back after the last kernel that reads it. No block is taken for a value that is its input under another shape,
nor where the kernel may write over an input that nothing else reads any more, nor for the program's outputs, whose
memory the trainer brings along.
"""

from collections.abc import Iterator
from itertools import chain

from subfleet.export.memory.blocks import BlockRequest, KernelCall, blocks_of
from subfleet.export.memory.onnx_run import ExecutedGraph
from subfleet.export.memory.onnx_scratch import scratch_of

__all__ = ["calls_of", "requests_of"]

_ALIASES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Kernels whose output is their first input's memory."""
_IN_PLACE = frozenset(
    {
        "Cast",
        "Celu",
        "Clip",
        "Elu",
        "HardSigmoid",
        "Identity",
        "LeakyRelu",
        "LogSoftmax",
        "Relu",
        "ScatterElements",
        "Selu",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "Softsign",
        "Tanh",
        "ThresholdedRelu",
        "Trilu",
    }
)
"""Kernels that may write over their first input, where it is as large. Recorded: arithmetic on two inputs may not."""


def requests_of(graph: ExecutedGraph) -> Iterator[BlockRequest]:
    """The requests of one run."""
    return chain.from_iterable(blocks_of(list(calls_of(graph)), {value.name for value in graph.graph.output}))


def calls_of(graph: ExecutedGraph) -> Iterator[KernelCall]:
    """The nodes of a graph as kernels."""
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
