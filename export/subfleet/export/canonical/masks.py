"""Masks of gradients: where they are applied, and which gradients may be infinite, so that they are selected.

The backward of an activation passes the gradient in some places and is 0 elsewhere. Lowerings multiply by 1 and 0,
which is fast, and the same for every finite gradient. After a division by what may be 0, as in the backward of a root,
a gradient may be infinite where the mask is 0, and 0 times infinity is NaN.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

aten = torch.ops.aten

CHOSEN: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    get_decompositions(
        (
            aten.threshold_backward.default,
            aten.hardtanh_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish_backward.default,
        )
    )
)
"""By operator: PyTorch's own decompositions select, so the gradient may be anything where it does not count."""

_DIVISIONS = frozenset({aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default})
_CARRYING = frozenset({
    aten.sqrt.default, aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.permute.default, aten.clone.default, aten.sum.dim_IntList, aten.sum.default,
    aten.mean.dim, aten.mul.Tensor,
})  # fmt: skip
"""Operators with a result above 0 if all inputs are."""


def mask_before_pools(graph: fx.GraphModule) -> None:
    """Mask the gradients of a maximum pool's windows instead of those of its input, if that comes from a ReLU.

    There are fewer windows, the input is needed no longer, and the numbers are the same: a window's gradient belongs to
    its maximum, which is above 0 where the element is that it was read from.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        spread, rectified, threshold = node.args
        if spread.target is not aten.max_pool2d_with_indices_backward.default or spread.args[1] is not rectified:
            continue
        indices = spread.args[-1]
        parts = indices.args[0].users if indices.target is operator.getitem else ()
        maxima = next((part for part in parts if part.args[1] == 0), None)
        if maxima is None or len(spread.users) > 1:
            continue
        with graph.graph.inserting_before(spread):
            masked = graph.graph.call_function(node.target, (spread.args[0], maxima, threshold))
        masked.meta["val"] = spread.args[0].meta["val"]
        spread.args = (masked, *spread.args[1:])
        node.replace_all_uses_with(spread)
        graph.graph.erase_node(node)
    graph.recompile()


def find_unbounded(graph: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes that depend on a division by what may be 0."""
    positive: set[fx.Node] = set()
    unbounded: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _is_positive(node, positive):
            positive.add(node)
        if _divides_by_zero(node, positive) or any(given in unbounded for given in node.all_input_nodes):
            unbounded.add(node)
    return frozenset(unbounded)


def _is_positive(node: fx.Node, positive: set[fx.Node]) -> bool:
    """Return whether an operator only gives numbers above 0; an added positive number counts as enough."""
    if node.op != "call_function":
        return False
    if node.target in {aten.clamp.default, aten.clamp_min.default}:
        least = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
        return isinstance(least, (int, float)) and least > 0
    if node.target is aten.exp.default:
        return True
    if node.target in {aten.full.default, aten.full_like.default}:
        return isinstance(node.args[1], (int, float)) and node.args[1] > 0
    if node.target in {aten.add.Tensor, aten.add.Scalar}:
        return any(
            (isinstance(operand, (int, float)) and operand > 0) or operand in positive for operand in node.args[:2]
        )
    given = [operand for operand in node.args[:2] if isinstance(operand, (int, float, fx.Node))]
    return node.target in _CARRYING and all(
        operand in positive if isinstance(operand, fx.Node) else operand > 0 for operand in given
    )


def _divides_by_zero(node: fx.Node, positive: set[fx.Node]) -> bool:
    if node.target in _DIVISIONS:
        divisor = node.args[-1]
        return isinstance(divisor, fx.Node) and divisor not in positive
    if node.target is aten.pow.Tensor_Scalar:
        exponent = node.args[1]
        return isinstance(exponent, (int, float)) and exponent < 0 and node.args[0] not in positive
    return False
