"""PyTorch's operators in ExecuTorch's dialect, and the operators that every runtime has a kernel for."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.targets.instead import instead_of
from subfleet.protocol.errors import ExportError

__all__ = ["KNOWN", "edge_target"]

aten = torch.ops.aten

_COPIES: Mapping[Any, Any] = MappingProxyType(
    {
        aten.view.default: aten.view_copy.default,
        aten.expand.default: aten.expand_copy.default,
        aten.transpose.int: aten.transpose_copy.int,
        aten.permute.default: aten.permute_copy.default,
        aten.unsqueeze.default: aten.unsqueeze_copy.default,
        aten.select.int: aten.select_copy.int,
        aten.squeeze.dim: aten.squeeze_copy.dim,
        aten.squeeze.dims: aten.squeeze_copy.dims,
        aten.slice.Tensor: aten.slice_copy.Tensor,
        aten.t.default: aten.t_copy.default,
    }
)
"""The runtime has no views: each becomes its copying form; the memory planner removes some of these again."""

_WITH_NUMBER: Mapping[Any, Any] = MappingProxyType(
    {
        aten.add.Tensor: aten.add.Scalar,
        aten.sub.Tensor: aten.sub.Scalar,
        aten.mul.Tensor: aten.mul.Scalar,
        aten.div.Tensor: aten.div.Scalar,
    }
)
"""Tensor operators with a separate kernel for a number as the second operand."""

KNOWN: frozenset[Any] = frozenset(
    {
        *_COPIES.values(),
        *_WITH_NUMBER,
        *_WITH_NUMBER.values(),
        aten._log_softmax.default,  # noqa: SLF001 - the operator's name
        aten._softmax.default,  # noqa: SLF001 - the operator's name
        aten._to_copy.default,  # noqa: SLF001 - the operator's name
        aten.abs.default,
        aten.addmm.default,
        aten.amax.default,
        aten.amin.default,
        aten.arange.start_step,
        aten.argmax.default,
        aten.argmin.default,
        aten.as_strided_copy.default,
        aten.bmm.default,
        aten.cat.default,
        aten.ceil.default,
        aten.clamp.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.cos.default,
        aten.cumsum.default,
        aten.embedding.default,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.erf.default,
        aten.exp.default,
        aten.flip.default,
        aten.floor.default,
        aten.full.default,
        aten.gather.default,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.index_put.default,
        aten.index_select.default,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.leaky_relu.default,
        aten.log.default,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.masked_fill.Scalar,
        aten.max_pool2d_with_indices.default,
        aten.maximum.default,
        aten.mean.dim,
        aten.minimum.default,
        aten.mm.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.ones.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.prod.default,
        aten.prod.dim_int,
        aten.reciprocal.default,
        aten.relu.default,
        aten.repeat.default,
        aten.round.default,
        aten.rsqrt.default,
        aten.rsub.Scalar,
        aten.scalar_tensor.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.sigmoid.default,
        aten.sign.default,
        aten.sin.default,
        aten.sqrt.default,
        aten.sum.dim_IntList,
        aten.tanh.default,
        aten.where.self,
        aten.zeros.default,
    }
)
"""Operators with a kernel in every build of the runtime; the tests run each of them."""

_DROPPED_OPTIONS = frozenset({"device", "layout", "pin_memory"})


def edge_target(node: fx.Node) -> Any:
    """Return the operator in ExecuTorch's dialect that does what a node does; its arguments are adapted in place."""
    from executorch.exir.dialects._ops import ops as dialects

    target: Any = _COPIES.get(node.target, node.target)
    if target in _WITH_NUMBER and not isinstance(node.args[1], fx.Node):
        target = _WITH_NUMBER[target]
    if target is aten.arange.default:
        target, node.args = aten.arange.start_step, (0, *node.args)
    if target not in KNOWN:
        raise ExportError(
            f"not every ExecuTorch runtime has a kernel for {target} (node {node.name!r}); {instead_of(target)}"
        )
    dropped = {*_DROPPED_OPTIONS, "memory_format"} if target is aten.clone.default else _DROPPED_OPTIONS
    node.kwargs = {name: option for name, option in node.kwargs.items() if name not in dropped}
    packet = getattr(dialects.edge.aten, target._schema.name.split("::")[1])  # noqa: SLF001 - no public name
    return getattr(packet, target._overloadname)  # noqa: SLF001 - no public name
