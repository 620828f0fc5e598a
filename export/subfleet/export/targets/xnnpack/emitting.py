"""From nodes of a lowered graph to XNNPACK's: the values so far, and what every operator's rule needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from subfleet.export.targets.xnnpack.graph import XnnpackGraph

__all__ = ["Rule", "XnnpackEmitter", "is_floating"]

_MOST_DIMS = 6


def is_floating(node: fx.Node) -> bool:
    """Whether a node gives a tensor that XNNPACK can hold here: single precision, six dimensions at most, not empty."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float32 and value.dim() <= _MOST_DIMS and value.numel() > 0


class XnnpackEmitter:
    """A region's graph in the making."""

    def __init__(self) -> None:
        self.graph = XnnpackGraph()
        self._values: dict[fx.Node, int] = {}

    def bind(self, node: fx.Node, value: int) -> None:
        """Give a node its value."""
        self._values[node] = value

    def value(self, argument: Any) -> int:
        """The value of a node or of a number."""
        if isinstance(argument, fx.Node):
            return self._values[argument]
        return self.graph.constant(float(argument))

    def scale(self, value: int, factor: float) -> int:
        """A value times a number."""
        return value if factor == 1.0 else self.graph.binary("Multiply", value, self.graph.constant(factor))


Rule = Callable[[XnnpackEmitter, fx.Node], int]
