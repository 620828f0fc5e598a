"""The order of dimensions in memory: a graph's transpositions, kept only where an operator needs them."""

from torch import fx

from subfleet.export.layouts.rules import RULES
from subfleet.export.layouts.transpositions import remove_transpositions

__all__ = ["settle_layouts"]


def settle_layouts(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that computes the same with as few transpositions as its operators allow."""
    return remove_transpositions(graph, RULES)
