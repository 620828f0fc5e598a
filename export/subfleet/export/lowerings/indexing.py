"""Reads and writes by tensors of indices, as one flat index of one dimension; and the backward of embeddings.

Shapes: I of the indices, which are broadcast together; V rows of an embedding table, D features of a row, T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

aten = torch.ops.aten

Indices = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexedDims:
    """The dimensions of a tensor that are indexed.

    Attributes:
        order: of the tensor's dimensions, such that the indexed ones are neighbours.
        first: position of the first indexed dimension in that order.
        count: number of indexed dimensions.
        flat_I: an index of all of them as one dimension, 0 or more.
    """

    order: tuple[int, ...]
    first: int
    count: int
    flat_I: Tensor  # noqa: N815 - shapes in names

    def flatten(self, x: Tensor) -> Tensor:
        """Return the tensor in this order, with the indexed dimensions as one."""
        ordered = x if self.order == tuple(range(x.dim())) else x.permute(self.order).contiguous()
        sizes = tuple(ordered.shape)
        end = self.first + self.count
        return ordered.reshape(*sizes[: self.first], math.prod(sizes[self.first : end]), *sizes[end:])

    def restore(self, flat: Tensor, like: Tensor) -> Tensor:
        """Invert `flatten`."""
        ordered = flat.reshape([like.shape[dim] for dim in self.order])
        if self.order == tuple(range(like.dim())):
            return ordered
        return ordered.permute([self.order.index(dim) for dim in range(like.dim())]).contiguous()

    def result_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of what is read."""
        sizes = [x.shape[dim] for dim in self.order]
        return (*sizes[: self.first], *self.flat_I.shape, *sizes[self.first + self.count :])


def _indexed_dims(x: Tensor, indices: Indices) -> _IndexedDims:
    """Resolve indices. Indexed dimensions stay in place in the result if they are neighbours, or else come first.

    Raises:
        ExportError: an index is a mask.
    """
    by_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in {torch.bool, torch.uint8} for index in by_dim.values()):
        raise ExportError(
            "a tensor is indexed by a mask, so the shape of the result depends on values; choose with "
            "torch.where(mask, a, b), or multiply by the mask"
        )
    dims = list(by_dim)
    neighbours = dims[-1] - dims[0] + 1 == len(dims)
    first = dims[0] if neighbours else 0
    order = list(range(x.dim())) if neighbours else [*dims, *(dim for dim in range(x.dim()) if dim not in by_dim)]
    flat: Tensor | None = None
    for dim, index in by_dim.items():
        index_in_dim = torch.where(index < 0, index + x.shape[dim], index)  # below 0 it counts from the end
        flat = index_in_dim if flat is None else flat * x.shape[dim] + index_in_dim
    if flat is None:
        raise ExportError("a tensor is indexed without an index; report it with the request")
    return _IndexedDims(order=tuple(order), first=first, count=len(dims), flat_I=flat)


def _index(x: Tensor, indices: Indices) -> Tensor:
    indexed = _indexed_dims(x, indices)
    chosen = indexed.flatten(x).index_select(indexed.first, indexed.flat_I.reshape(-1))
    return chosen.reshape(indexed.result_shape(x))


def _index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False, *_unsafe: object) -> Any:
    """Lower all forms except rows at one index of the first dimension, which runtimes have: NotImplemented."""
    indexed = _indexed_dims(x, indices)
    shape = indexed.result_shape(x)
    if indexed.count == 1 and indexed.first == 0 and indexed.flat_I.dim() == 1 and tuple(values.shape) == shape:
        return NotImplemented
    gathered = indexed.flatten(x)
    sizes = tuple(gathered.shape)
    values = values.expand(shape).reshape(*sizes[: indexed.first], -1, *sizes[indexed.first + 1 :])
    put = _index_add(gathered, indexed.first, indexed.flat_I.reshape(-1), values, accumulate=accumulate)
    return indexed.restore(put, x)


def _index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, accumulate: bool = True
) -> Tensor:
    source = source if alpha == 1 else source * alpha
    dim = dim % x.dim()
    if dim == 0:
        added: Tensor = aten.index_put.default(x, [index], source, accumulate)
        return added
    swapped: Tensor = aten.index_put.default(
        x.transpose(0, dim).contiguous(), [index], source.transpose(0, dim).contiguous(), accumulate
    )
    return swapped.transpose(0, dim).contiguous()


def _embedding_backward(
    gradient: Tensor, tokens: Tensor, vocabulary: int, padding_index: int, scale_by_frequency: bool
) -> Tensor:
    """Add each token's gradient to its row of the table."""
    if scale_by_frequency:
        raise ExportError("an embedding has scale_grad_by_freq, which cannot be lowered; leave that option off")
    g_td, tokens_t = gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1)
    if 0 <= padding_index < vocabulary:
        g_td = g_td * (tokens_t != padding_index).to(g_td.dtype).reshape(-1, 1)
    zeros_vd = torch.zeros((vocabulary, g_td.shape[1]), dtype=g_td.dtype)
    added: Tensor = aten.index_put.default(zeros_vd, [tokens_t], g_td, True)
    return added


INDEXING: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.index.Tensor: _index,
        aten._unsafe_index.Tensor: _index,  # noqa: SLF001 - the operator's name
        aten.index_put.default: _index_put,
        aten._unsafe_index_put.default: _index_put,  # noqa: SLF001 - the operator's name
        aten.index_add.default: _index_add,
    }
)
