"""The requests that one run of a program makes of ONNX Runtime's arena, in order.

With planned reuse off, as trainers set it, the runtime takes a block for every value when its kernel asks for it and
gives it back after the last kernel that reads it. No block is taken for a value that is its input under another shape,
nor where the kernel may write over an input that nothing else reads any more, nor for the program's outputs, whose
memory the trainer brings along.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from subfleet.export.memory.onnx_arena import Arena, arena_after
from subfleet.export.memory.onnx_run import RanGraph, RanNode
from subfleet.export.memory.onnx_scratch import scratch_of

__all__ = ["ALIASES", "IN_PLACE", "Give", "Take", "filled_arena", "live_bytes", "requests_of"]

ALIASES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Kernels whose output is their first input's memory."""
IN_PLACE = frozenset(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A block is taken.

    Attributes:
        name: unique in the run.
        size_bytes: of the block.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """A block is given back."""

    name: str


def requests_of(graph: RanGraph) -> Iterator[Take | Give]:
    """The requests of one run."""
    owners, last_reader = _owners(graph)
    ends: defaultdict[int, list[str]] = defaultdict(list)
    for owner, place in last_reader.items():
        if owner not in graph.held and owner not in graph.results and graph.types[owner].size_bytes:
            ends[place].append(owner)
    for place, node in enumerate(graph.nodes):
        scratch = scratch_of(node, graph.types)
        takes = [
            Take(name=f"{place}/{index}", size_bytes=size)
            for index, size in enumerate((*scratch.before_bytes, *scratch.after_bytes))
        ]
        before, after = takes[: len(scratch.before_bytes)], takes[len(scratch.before_bytes) :]
        results = [
            Take(name=name, size_bytes=graph.types[name].size_bytes)
            for name in node.outputs
            if name and owners[name] == name and name not in graph.results and graph.types[name].size_bytes
        ]
        gives = [Give(name=name) for name in (*(take.name for take in takes), *ends[place])]
        yield from [*before, *results, *after]
        yield from gives


def _owners(graph: RanGraph) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """The value whose block each value lies in, and the place of the last node that needs each block."""
    uses = Counter(graph.held) + Counter(graph.results)
    for node in graph.nodes:
        uses.update(name for name in (*node.inputs, *node.outputs) if name)
    owners = {name: name for name in graph.held}
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for index, name in enumerate(node.outputs):
            if not name:
                continue
            shared = _shared_input(node, name, graph, owners, uses) if index == 0 else None
            owners[name] = name if shared is None else owners[shared]
            if shared is not None:
                uses[owners[name]] += uses[name]
        for name in (*node.inputs, *node.outputs):
            if name:
                uses[owners[name]] -= 1
                last[owners[name]] = place
    return owners, last


def _shared_input(
    node: RanNode, output: str, graph: RanGraph, owners: Mapping[str, str], uses: Mapping[str, int]
) -> str | None:
    """The input in whose memory an output comes to lie."""
    if output in graph.results or not node.inputs or not node.inputs[0]:
        return None
    first = node.inputs[0]
    if node.operator in ALIASES:
        return first
    same = graph.types[first] == graph.types[output]
    return first if node.operator in IN_PLACE and same and uses[owners[first]] == 1 else None


def live_bytes(graph: RanGraph) -> int:
    """The most bytes of the run's own values that are alive at once, without kernels' scratch memory."""
    alive = peak = 0
    sizes: dict[str, int] = {}
    for request in requests_of(graph):
        if isinstance(request, Give):
            alive -= sizes.pop(request.name, 0)
        elif request.name in graph.types:
            sizes[request.name] = request.size_bytes
            alive += request.size_bytes
            peak = max(peak, alive)
    return peak


def filled_arena(graph: RanGraph) -> Arena:
    """The arena after any number of runs."""
    return arena_after((one.name, one.size_bytes if isinstance(one, Take) else None) for one in requests_of(graph))
