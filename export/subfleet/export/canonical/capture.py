"""A step as a graph of PyTorch's basic operators, none of which changes a tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.failures import as_export_errors
from subfleet.export.steps.values import Step

__all__ = ["captured", "functional_graph"]


def captured(step: Step) -> fx.GraphModule:
    """Trace a step with its shapes alone. Nodes carry a fake tensor of their shape and type in `meta["val"]`.

    A change in place becomes a new tensor, and so does every view of what was changed. Tensors that the network holds
    are attributes of the graph.

    Raises:
        ExportError: the step cannot be traced, for instance because a layer depends on values.
    """
    example = step.example(torch.Generator().manual_seed(0))
    with as_export_errors("the training step cannot be traced", "use layers whose shapes do not depend on values"):
        return functional_graph(step.run, example)


def functional_graph(run: Callable[..., Any], example: Sequence[Tensor]) -> fx.GraphModule:
    """What a function does to tensors, as `captured`."""
    functional = dispatch_functionalize(run, FunctionalTensorMode())
    return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
