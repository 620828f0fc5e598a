"""Captures a step as a graph of PyTorch's basic operators, none of which changes a tensor."""

import torch
from torch import fx

from subfleet.export.canonical.likeness import are_alike
from subfleet.export.failures import as_export_errors
from subfleet.export.recording import trace_functional
from subfleet.export.steps.seeding import SeededRandomness
from subfleet.export.steps.step import DTYPES, Step
from subfleet.protocol.errors import ExportError

__all__ = ["capture_step"]

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def capture_step(step: Step) -> fx.GraphModule:
    """Trace a step with its shapes only. Nodes carry a fake tensor of their shape and type in `meta["val"]`.

    A change in place becomes a new tensor, and so does every view of the changed tensor. Tensors that the network holds
    are attributes of the graph. The step is traced twice: what differs by chance, or by unknown state, must not become
    a program.

    Raises:
        ExportError: the step cannot be traced, for example because a layer depends on values; or it differs between
            runs.
    """
    with SeededRandomness(0):
        first = _trace_step(step)
    with SeededRandomness(1):
        if are_alike(first, _trace_step(step)):
            return first
    raise ExportError(
        "the network does something else each time it runs, by a counter, an iterator or random numbers of its own, "
        "but a program does the same in every step; draw with torch.rand, torch.randn or torch.bernoulli, and keep "
        "counts in a persistent buffer of torch.float32"
    )


def _trace_step(step: Step) -> fx.GraphModule:
    shapes = [torch.empty(value.shape, dtype=_TYPES[value.dtype], device="meta") for value in step.inputs]
    with as_export_errors("the training step cannot be traced", "use layers whose shapes do not depend on values"):
        return trace_functional(step.run, shapes, lambda: step.example(torch.Generator().manual_seed(0)))
