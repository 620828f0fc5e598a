"""The blocks of memory that a program's kernels take and free, and those of a traced graph in eager PyTorch."""

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from subfleet.export.tracing import results_of

BlockRequest = tuple[str, int | None]
"""A block's name with its size when it is taken, or with None when it is freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A call of a kernel.

    Attributes:
        inputs: names of values.
        outputs: names of values, with their bytes.
        shares: whether its first output is its first input with another shape.
        overwrites: inputs that its first output may overwrite, if it is as large and nothing else reads them.
        before_bytes: blocks taken while it runs, before its outputs.
        after_bytes: blocks taken while it runs, after its outputs.
        constants: of constants that no later call reads, the bytes, and the columns of a matrix that is kept in stripes
            of columns, else 0.
        object_bytes: bytes of the runtime's objects.
        part: part of the program; blocks that outlive their part are in a separate memory.
        passes_on: whether it only cuts or reshapes its input.
        pads: whether it only adds a border to its input.
        pools: whether it is part of a pool, or of its gradient.
        narrow: whether it is only there if a convolution has few inputs, or only if it has more; None if always.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    shares: bool = False
    overwrites: tuple[str, ...] = ()
    before_bytes: tuple[int, ...] = ()
    after_bytes: tuple[int, ...] = ()
    constants: tuple[tuple[int, int], ...] = ()
    object_bytes: int = 0
    part: int = 0
    passes_on: bool = False
    pads: bool = False
    pools: bool = False
    narrow: bool | None = None


def blocks_of(calls: Sequence[KernelCall], held: Collection[str]) -> list[list[BlockRequest]]:
    """Return the blocks that each call takes, and those that are freed after it.

    Args:
        calls: the calls in order.
        held: values that the caller holds.
    """
    owners = _owners(calls, held)
    ends = {owner: at for at, call in enumerate(calls) for owner in _owners_of(call, owners)}
    requests = []
    for at, call in enumerate(calls):
        own: list[BlockRequest] = [(name, size) for name, size in call.outputs.items() if owners.get(name) == name]
        before: list[BlockRequest] = [(f"{at}/<{index}", size) for index, size in enumerate(call.before_bytes)]
        after: list[BlockRequest] = [(f"{at}/>{index}", size) for index, size in enumerate(call.after_bytes)]
        ended = sorted(owner for owner in _owners_of(call, owners) if ends[owner] == at)
        freed = [*(name for name, _ in (*before, *after)), *ended]
        requests.append([*before, *own, *after, *((name, None) for name in freed)])
    return requests


def peak_bytes(requests: Iterable[BlockRequest]) -> int:
    """Return the largest number of bytes that are taken at once."""
    sizes: dict[str, int] = {}
    alive = peak = 0
    for name, size in requests:
        if size is not None:
            sizes[name] = size
        alive += sizes[name] if size is not None else -sizes[name]
        peak = max(peak, alive)
    return peak


def _owners_of(call: KernelCall, owners: Mapping[str, str]) -> set[str]:
    return {owners[name] for name in (*call.inputs, *call.outputs) if name in owners}


def _owners(calls: Sequence[KernelCall], held: Collection[str]) -> Mapping[str, str]:
    """Return the value that owns the block of each value, without values that the caller holds."""
    uses = Counter(name for call in calls for name in (*call.inputs, *call.outputs))
    sizes = {name: size for call in calls for name, size in call.outputs.items()}
    owners: dict[str, str] = {}
    for call in calls:
        for index, (name, size) in enumerate(call.outputs.items()):
            if not size or name in held or (call.shares and index == 0 and call.inputs[0] not in owners):
                continue
            fitting = (
                name_of_input
                for name_of_input in call.overwrites
                if name_of_input in owners and sizes[name_of_input] == size
            )
            last = (name_of_input for name_of_input in fitting if uses[owners[name_of_input]] == 1)
            shared = call.inputs[0] if call.shares else next(last, None)
            owners[name] = name if shared is None or index else owners[shared]
            if owners[name] != name:
                uses[owners[name]] += uses[name]
        for name in (*call.inputs, *call.outputs):
            uses[owners.get(name, name)] -= 1
    return owners


aten = torch.ops.aten

_SHARES = frozenset({aten.view.default, aten.unsqueeze.default, aten.squeeze.dims})
"""Operators that return their input's memory with another shape."""


def activation_peak_bytes(graph: fx.GraphModule) -> int:
    """Return the most bytes of intermediate results alive at once, in the graph's own order.

    Inputs and outputs are not counted, since the caller holds them. A convolution also needs the patches of one sample.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    blocks = blocks_of(calls_of(nodes), {node.name for node in results_of(graph)})
    return peak_bytes(chain.from_iterable(blocks))


def calls_of(nodes: Sequence[fx.Node]) -> tuple[KernelCall, ...]:
    """Convert nodes of a traced graph to calls of kernels."""
    return tuple(
        KernelCall(
            inputs=tuple(argument.name for argument in node.all_input_nodes),
            outputs=_outputs(node),
            shares=node.target in _SHARES,
            after_bytes=tuple(filter(None, [_workspace_bytes(node)])),
        )
        for node in nodes
    )


def size_bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's result; 0 for several results."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _outputs(node: fx.Node) -> dict[str, int]:
    """Return a node's results; several results are returned at once, named after the nodes that separate them."""
    if node.target is operator.getitem:
        return {}
    alone = isinstance(node.meta.get("val"), torch.Tensor)
    return {user.name: size_bytes_of(user) for user in ([node] if alone else node.users)}


def _workspace_bytes(node: fx.Node) -> int:
    """Return the size of the patches of one sample that a convolution copies for its matrix product."""
    if node.target is not aten.convolution.default:
        return 0
    inputs, weight = node.args[:2]
    if not isinstance(inputs, fx.Node) or not isinstance(weight, fx.Node):
        return 0
    positions_of = inputs if node.args[6] else node  # a transposed convolution unfolds its input
    kernel = weight.meta["val"].shape[1:].numel()
    return int(kernel * positions_of.meta["val"].shape[2:].numel() * 4)
