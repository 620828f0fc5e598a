"""Operators that change a tensor in place, as new tensors.

A step is a pure function, so a change in place becomes a new value under the old name, from there on. That holds while
nothing else reads the old memory; a view of it, read later, would still show the old value and is refused.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from subfleet.protocol.errors import ExportError

__all__ = ["IN_PLACE", "write_copies"]

aten = torch.ops.aten

_CHANGES: Mapping[Any, Any] = MappingProxyType(
    {
        aten.add_.Tensor: aten.add.Tensor,
        aten.add_.Scalar: aten.add.Scalar,
        aten.sub_.Tensor: aten.sub.Tensor,
        aten.sub_.Scalar: aten.sub.Scalar,
        aten.mul_.Tensor: aten.mul.Tensor,
        aten.mul_.Scalar: aten.mul.Scalar,
        aten.div_.Tensor: aten.div.Tensor,
        aten.div_.Scalar: aten.div.Scalar,
        aten.clamp_.default: aten.clamp.default,
        aten.clamp_min_.default: aten.clamp_min.default,
        aten.clamp_max_.default: aten.clamp_max.default,
        aten.exp_.default: aten.exp.default,
        aten.sqrt_.default: aten.sqrt.default,
        aten.neg_.default: aten.neg.default,
        aten.zero_.default: aten.zeros_like.default,
        aten.fill_.Scalar: aten.full_like.default,
        aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
        aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
        aten.logical_and_.default: aten.logical_and.default,
        aten.logical_or_.default: aten.logical_or.default,
        aten.logical_not_.default: aten.logical_not.default,
        aten.relu_.default: aten.relu.default,
        aten.hardtanh_.default: aten.hardtanh.default,
        aten.hardswish_.default: aten.hardswish.default,
        aten.hardsigmoid_.default: aten.hardsigmoid.default,
        aten.silu_.default: aten.silu.default,
        aten.gelu_.default: aten.gelu.default,
        aten.elu_.default: aten.elu.default,
        aten.celu_.default: aten.celu.default,
        aten.selu_.default: aten.selu.default,
        aten.mish_.default: aten.mish.default,
        aten.leaky_relu_.default: aten.leaky_relu.default,
        aten.sigmoid_.default: aten.sigmoid.default,
        aten.tanh_.default: aten.tanh.default,
        aten.addcmul_.default: aten.addcmul.default,
        aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    }
)
"""Each operator that changes its first argument, and the one that gives the result anew."""


def _copied(functional: Any) -> Callable[..., Tensor]:
    def change(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        changed: Tensor = aten.copy_.default(x, functional(x, *arguments, **options))
        return changed

    return change


IN_PLACE: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {changing: _copied(functional) for changing, functional in _CHANGES.items()}
)

_VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.transpose.int,  # noqa: SLF001
        aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default,
        aten.slice.Tensor, aten.select.int, aten.t.default, aten.detach.default, aten.alias.default,
    }
)  # fmt: skip


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment] # a view's first argument is a node
    return node


def write_copies(graph: fx.GraphModule) -> None:
    """Replace each change in place by its new value.

    Raises:
        ExportError: a tensor is changed whose memory is read later through another view, or is an input's.
    """
    nodes = list(graph.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        if node.op != "call_function" or node.target is not aten.copy_.default:
            continue
        changed, value = node.args[:2]
        owner = _owner(changed)
        stale = [
            other
            for other in nodes
            if other is not node and _owner(other) is owner and any(places[user] > places[node] for user in other.users)
        ]
        if stale or owner.op == "placeholder":
            raise ExportError(
                f"a layer changes a tensor in place (node {node.name!r}) that is read again under another name; "
                "use the form of the operation that gives a new tensor"
            )
        with graph.graph.inserting_before(node):
            if value.meta["val"].dtype != node.meta["val"].dtype:
                value = _inserted(graph, node, aten._to_copy.default, (value,), {"dtype": node.meta["val"].dtype})  # noqa: SLF001
            if tuple(value.meta["val"].shape) != tuple(node.meta["val"].shape):
                value = _inserted(graph, node, aten.expand.default, (value, list(node.meta["val"].shape)), {})
        node.replace_all_uses_with(value)
        graph.graph.erase_node(node)


def _inserted(graph: fx.GraphModule, like: fx.Node, target: Any, arguments: tuple[Any, ...], options: Any) -> fx.Node:
    new = graph.graph.call_function(target, arguments, options)
    new.meta["val"] = like.meta["val"]
    return new
