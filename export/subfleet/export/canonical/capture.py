"""A step as a graph of PyTorch's basic operators, none of which changes a tensor."""

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.failures import as_export_errors
from subfleet.export.steps.values import Step

__all__ = ["captured"]


def captured(step: Step) -> fx.GraphModule:
    """Trace a step with its shapes alone. Nodes carry a fake tensor of their shape and type in `meta["val"]`.

    A change in place becomes a new tensor, and so does every view of what was changed. Tensors that the network holds
    are attributes of the graph.

    Raises:
        ExportError: the step cannot be traced, for instance because a layer depends on values.
    """
    example = step.example(torch.Generator().manual_seed(0))
    run = dispatch_functionalize(step.run, FunctionalTensorMode())
    with as_export_errors("the training step cannot be traced", "use layers whose shapes do not depend on values"):
        return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
