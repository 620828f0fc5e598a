"""Checks that a captured graph contains nothing that no target can do, and whether two graphs compute the same."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from subfleet.protocol.errors import ExportError


def are_alike(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Return whether two graphs compute the same from their inputs."""
    known: dict[Hashable, int] = {}
    numbers = []
    for graph in (first, second):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        results: Any = graph.graph.output_node().args[0]
        numbers.append(number_results(graph, inputs, list(results), known))
    return numbers[0] == numbers[1]


def number_results(
    graph: fx.GraphModule, own: Sequence[fx.Node], results: Sequence[fx.Node], known: dict[Hashable, int]
) -> list[int]:
    """Return a number for each result that identifies how it is computed: equal ones are computed in the same way.

    Args:
        graph: without operators that change a tensor.
        own: nodes of the run's own tensors, which are identified by their position.
        results: its results.
        known: numbers assigned so far.
    """
    positions = {node: position for position, node in enumerate(own)}
    number_of: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        key: Hashable
        if node.op == "placeholder":
            key = ("own", positions[node]) if node in positions else ("other", node.name)
        elif node.op == "get_attr":
            key = ("held", _value(getattr(graph, node.target)))
        else:
            given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: f"%{number_of[part]}")
            key = (str(node.target), repr(given))
        number_of[node] = known.setdefault(key, len(known))
    return [number_of[node] for node in results]


def _value(tensor: Any) -> Hashable:
    """Identify a tensor that each run creates anew by its numbers."""
    if type(tensor) not in {Tensor, nn.Parameter}:
        return id(tensor)
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(bits)


_TYPES = frozenset({torch.float32, torch.int64, torch.int32, torch.bool})


def is_functional(graph: fx.GraphModule) -> bool:
    """Return whether no operator changes the numbers of its inputs."""
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    called.discard(torch.ops.aten.detach_.default)  # it only affects autograd
    return not any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in called)  # noqa: SLF001


def check_constants(graph: fx.GraphModule, carried: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Check that what a graph contains stays the same from step to step.

    Args:
        graph: without dead code.
        carried: tensors that steps change, by name.
        held: constants, by name.

    Raises:
        ExportError: a constant shares the memory of a carried tensor, or is left from an earlier run.
    """
    owners = {_memory(tensor): name for name, tensor in carried.items() if tensor.numel()}
    names = {id(tensor): name for name, tensor in held.items()}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, (FakeTensor, FunctionalTensor)):
            raise ExportError(
                f"the network keeps a tensor of the shape {tuple(value.shape)} from one run to the next outside of its "
                "buffers, which programs do not store; register it as a persistent buffer of torch.float32"
            )
        owner = owners.get(_memory(value)) if value.numel() else None
        if owner is not None:
            name = names.get(id(value))
            what = f"its tensor {name!r}" if name else f"a tensor of the shape {tuple(value.shape)}"
            raise ExportError(
                f"the network reads {what}, which shares the memory of {owner!r}, but a program only updates {owner!r} "
                f"and would keep the current value of the other; compute it in forward from {owner!r}"
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_operators(graph: fx.GraphModule) -> None:
    """Check that what a graph does can be repeated, in single precision.

    Raises:
        ExportError: an operator draws random numbers, or returns a floating-point type other than float32.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"the network draws its own random numbers by {node.target} (node {node.name!r}), which no program can "
                "replay; use nn.Dropout, which takes its randomness from the program's inputs"
            )
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype.is_complex:
            raise ExportError(
                f"the network computes with complex numbers by {node.target} (node {node.name!r}), which no "
                "program can; multiply by fixed matrices of sines and cosines instead of a Fourier transform"
            )
        if isinstance(value, Tensor) and value.dtype not in _TYPES:
            raise ExportError(
                f"the network computes in {value.dtype} by {node.target} (node {node.name!r}), but a program computes "
                "only in torch.float32; leave out autocast, and convert what the layer makes with .float()"
            )
