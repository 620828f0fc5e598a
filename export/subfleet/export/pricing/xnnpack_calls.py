"""What XNNPACK makes of a region's graph: the nodes that it keeps, and the blocks of its workspace that they take.

XNNPACK rewrites a graph before it plans its memory, and lets some nodes write over their input. The rules are those of
its sources (`subgraph.c`, `runtime.c`, `operators/batch-matrix-multiply-nc.c`); records of its planner in running
programs have the same blocks with the same lifetimes.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.export.memory.formulas import STRIPES, Formula
from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.pricing.recording import Node
from subfleet.export.targets.xnnpack.graph import Graph

__all__ = ["Call", "nodes_of", "region_calls"]

_FLOAT_BYTES = 4
_PACKED_COLUMNS: Mapping[str, int] = MappingProxyType({"BatchMatrixMultiply": 32, "FullyConnected": 16})
"""A product's second factor is laid out anew, in stripes of so many columns (with AVX-512; others have fewer)."""
_IN_PLACE = frozenset(
    {
        "Abs",
        "Add",
        "Clamp",
        "Copy",
        "Div",
        "Exp",
        "Gelu",
        "Log",
        "Maximum",
        "Minimum",
        "Multiply",
        "Negate",
        "ReciprocalSquareRoot",
        "Sigmoid",
        "Softmax",
        "Square",
        "SquareRoot",
        "StaticReshape",
        "Subtract",
        "Tanh",
    }
)
"""Nodes that write over an input of the same size, where both it and the result are read by a single node."""
_OBJECT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BatchMatrixMultiply": 2620,
        "FullyConnected": 2620,
        **{f"Concatenate{parts}": 760 + 745 * parts for parts in range(2, 6)},
        "GlobalAvgPooling2d": 1700,
        "StaticReshape": 1530,
        "StaticSlice": 1620,
    }
)
"""For a node of a kind. Measured in programs with 20 and with 120 of them; its part of the program counts with all
copies of the program."""
_ANY_OBJECT_BYTES = 1480
_PROGRAM_COPIES = 3
_Written = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node of XNNPACK's, or of the runtime's own.

    Attributes:
        kind: of XNNPACK's node; empty for one of the runtime's.
        inputs: names of values that are not known beforehand.
        output: name of a value.
        size_bytes: of the output; one of size 0 takes no block.
        scratch: taken for itself while it runs.
        inside: whether the output lies in XNNPACK's workspace.
        part: number of the instruction of the runtime's that it belongs to.
        object_bytes: of structures that the runtime makes for it, and of its part of the program.
    """

    kind: str
    inputs: tuple[str, ...]
    output: str
    size_bytes: int
    part: int
    object_bytes: int
    scratch: Formula | None = None
    inside: bool = False


def region_calls(graph: Graph, names: Sequence[str], part: int) -> Iterator[Call]:
    """The nodes of a region as XNNPACK runs them.

    Args:
        graph: of the region.
        names: of the region's inputs and outputs.
        part: number of the region among the runtime's instructions.
    """
    outside = dict(zip((*graph.inputs, *graph.outputs), names, strict=True))
    stored: set[int] = set()
    for kind, inputs, output in _rewritten(graph):
        constants = {value for value in inputs if graph.is_constant(value)} - stored
        stored |= constants
        packed = _packed(graph, kind, inputs, output)
        packed_early = kind in _PACKED_COLUMNS and graph.is_constant(inputs[1])
        yield Call(
            kind=kind,
            inputs=tuple(outside.get(value, f"{part}/{value}") for value in inputs if not graph.is_constant(value)),
            output=outside.get(output, f"{part}/{output}"),
            size_bytes=_bytes_of(graph, output),
            scratch=None if packed_early else packed,
            inside=output not in outside,
            part=part,
            object_bytes=_OBJECT_BYTES.get(kind, _ANY_OBJECT_BYTES)
            + (packed.size_bytes if packed and packed_early else 0)
            + _PROGRAM_COPIES * sum(_bytes_of(graph, value) for value in constants),
        )


def _rewritten(graph: Graph) -> list[_Written]:
    """The nodes that XNNPACK keeps of a graph."""
    calls = _without_transposed_weights(_without_double_reshapes(list(graph.calls()), set(graph.outputs)))
    kept: list[_Written] = []
    same: dict[int, int] = {}
    for kind, given, output in calls:
        inputs = tuple(same.get(value, value) for value in given)
        if kind == "StaticReshape" and graph.shape(inputs[0]) == graph.shape(output) and output not in graph.outputs:
            same[output] = inputs[0]
        elif kind == "Multiply" and inputs[0] == inputs[1]:
            kept.append(("Square", inputs[:1], output))
        else:
            kept.append((kind, inputs, output))
    return kept


def _without_double_reshapes(calls: Sequence[_Written], results: Collection[int]) -> list[_Written]:
    """A shape that a tensor has only until it gets another one is left out."""
    readers = _readers(calls)
    sources: dict[int, int] = {}
    for kind, inputs, output in calls:
        if kind == "StaticReshape":
            source = sources.get(inputs[0], inputs[0]) if readers[inputs[0]] == 1 else inputs[0]
            sources[output] = inputs[0] if inputs[0] in results else source
    passed = {inputs[0] for kind, inputs, output in calls if kind == "StaticReshape" and sources[output] != inputs[0]}
    return [
        (kind, (sources[output],) if kind == "StaticReshape" else inputs, output)
        for kind, inputs, output in calls
        if output not in passed
    ]


def _without_transposed_weights(calls: Sequence[_Written]) -> list[_Written]:
    """A layer reads its transposed weight as it is held."""
    readers = _readers(calls)
    transposed = {output: inputs[0] for kind, inputs, output in calls if kind == "StaticTranspose"}
    weights = {inputs[1] for kind, inputs, _ in calls if kind == "FullyConnected" and readers[inputs[1]] == 1}
    held = {value: transposed[value] for value in weights & transposed.keys()}
    return [
        (kind, tuple(held.get(value, value) for value in inputs), output)
        for kind, inputs, output in calls
        if output not in held
    ]


def _readers(calls: Sequence[_Written]) -> Counter[int]:
    """How many nodes read each value."""
    return Counter(value for _, inputs, _ in calls for value in set(inputs))


def _packed(graph: Graph, kind: str, inputs: Sequence[int], output: int) -> Formula | None:
    """A product's second factor in stripes."""
    if kind not in _PACKED_COLUMNS:
        return None
    factor, stripe, columns = graph.shape(inputs[1]), _PACKED_COLUMNS[kind], graph.shape(output)[-1]
    rows = factor[-1] * factor[-2] // columns
    return Formula(kind=STRIPES, numbers=(math.prod(factor[:-2]), rows, columns, stripe))


def _bytes_of(graph: Graph, value: int) -> int:
    return _FLOAT_BYTES * math.prod(graph.shape(value))


def nodes_of(calls: Sequence[Call], held: Collection[str]) -> Iterator[Node]:
    """The calls with the blocks that they take and give back, and a block of size 0 wherever a part begins.

    Args:
        calls: of all regions, and between them, in order.
        held: names of the caller's values.
    """
    owners = _owners(calls, held)
    ends = {
        owners[name]: place
        for place, call in enumerate(calls)
        for name in (*call.inputs, call.output)
        if name in owners
    }
    for place, call in enumerate(calls):
        name = call.output
        begins = place == 0 or calls[place - 1].part != call.part
        begin = [(f"{name}|", 0), (f"{name}|", GIVEN_BACK)] if begins else []
        takes = [(name, call.size_bytes)] if owners.get(name) == name else []
        scratch = [(f"{name}/", call.scratch.size_bytes), (f"{name}/", GIVEN_BACK)] if call.scratch else []
        used = dict.fromkeys(owners[given] for given in (*call.inputs, name) if given in owners)
        gives = [(owner, GIVEN_BACK) for owner in used if ends[owner] == place]
        yield Node(
            inputs=call.inputs,
            outputs=(name,),
            requests=(*begin, *takes, *scratch, *gives),
            weight=call.object_bytes,
            formulas={f"{name}/": call.scratch} if call.scratch else {},
        )


def _owners(calls: Sequence[Call], held: Collection[str]) -> dict[str, str]:
    """In which value's block each value lies that has one."""
    readers = Counter(name for call in calls for name in set(call.inputs))
    reusable = {call.output: call.size_bytes for call in calls if call.inside and readers[call.output] == 1}
    owners: dict[str, str] = {}
    for call in calls:
        if call.output not in held and call.size_bytes:
            in_place = call.kind in _IN_PLACE and call.output in reusable
            fitting = (given for given in call.inputs if in_place and reusable.get(given) == call.size_bytes)
            overwritten = next(fitting, None)
            owners[call.output] = call.output if overwritten is None else owners[overwritten]
    return owners
