"""What a captured graph may not hold, whatever the target."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from subfleet.export.steps.module_state import changed_constant
from subfleet.protocol.errors import ExportError

__all__ = ["check_constants", "check_operators", "is_functional"]

_TYPES = frozenset({torch.float32, torch.int64, torch.int32, torch.bool})


def is_functional(graph: fx.GraphModule) -> bool:
    """Whether no operator changes the numbers that it is given."""
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    called.discard(torch.ops.aten.detach_.default)  # it changes what autograd knows
    return not any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in called)  # noqa: SLF001


def check_constants(graph: fx.GraphModule, stale: Mapping[str, Tensor]) -> None:
    """Make sure that no result depends on a constant that the network replaces while it runs.

    Raises:
        ExportError: one does.
    """
    held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    for name, tensor in stale.items():
        if any(value is tensor for value in held):
            raise ExportError(changed_constant(name))


def check_operators(graph: fx.GraphModule) -> None:
    """Make sure that what a graph does can be repeated, in single precision.

    Raises:
        ExportError: an operator draws random numbers, or gives a floating type other than float32.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"the network draws its own random numbers by {node.target} (node {node.name!r}), which no program can "
                "replay; use nn.Dropout, whose randomness a program is given"
            )
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype not in _TYPES:
            raise ExportError(
                f"the network computes in {value.dtype} by {node.target} (node {node.name!r}), but a program does in "
                "torch.float32 alone; leave out autocast, and convert what the layer makes with .float()"
            )
