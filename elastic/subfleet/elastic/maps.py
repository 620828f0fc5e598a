"""Maps between the tensors of a submodel and those of the full network."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from subfleet.elastic.axes import factor_sizes, list_indices, list_parts, list_sum_indices
from subfleet.elastic.network import Network, TensorDecl
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

__all__ = ["extract", "tensor_maps"]


class TensorMap(Protocol):
    """A linear map from a tensor of the full network to one of a submodel, and back by adding."""

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor. It may share memory with `tensor`."""
        ...

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add the local values to `into`, a tensor of the full shape, at the positions where `extract` reads them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Selects indices of each factor of each dimension independently.

    Attributes:
        index: a slice for each factor; or, if the indices of any factor are not a slice, an index tensor for each,
            shaped to broadcast against the others.
        unfolded: shape of the full tensor with one dimension for each factor; None if no dimension is a product.
        unfolded_local: the same shape of the local tensor.
        local: shape of the local tensor.
    """

    index: tuple[slice, ...] | tuple[Tensor, ...]
    unfolded: tuple[int, ...] | None = None
    unfolded_local: tuple[int, ...] | None = None
    local: tuple[int, ...] | None = None

    def measure_local(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return self.local or tuple(
            own.stop - own.start if isinstance(own, slice) else own.numel() for own in self.index
        )

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: a view if all factors are slices and no dimension is a product, else a copy."""
        if self.unfolded is None or self.local is None:
            return tensor[self.index]
        return tensor.reshape(self.unfolded)[self.index].reshape(self.local)

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add `local` to its elements of `into`, in place. Every index occurs once, so nothing is added twice."""
        if self.unfolded is None or self.unfolded_local is None:
            into[self.index] += local
        else:
            into.view(self.unfolded)[self.index] += local.reshape(self.unfolded_local)


def drop_dims(gather: Gather, count: int) -> Gather:
    """The map of a tensor without its last dimensions, which it does not cut and which are no products."""
    index = tuple(own if isinstance(own, slice) else own.reshape(own.shape[:-count]) for own in gather.index[:-count])
    return Gather(
        index=index,  # type: ignore[arg-type]
        unfolded=gather.unfolded and gather.unfolded[:-count],
        unfolded_local=gather.unfolded_local and gather.unfolded_local[:-count],
        local=gather.local and gather.local[:-count],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Assigns a tensor of a submodel to one of the full network. A tensor may have several placements (grafting).

    Attributes:
        local: name of the submodel's tensor.
        name: name of the full network's tensor.
        map: map between the two.
    """

    local: str
    name: str
    map: TensorMap


def tensor_maps(network: Network, architecture: Architecture) -> dict[str, TensorMap]:
    """A map for each tensor of a submodel, in network order.

    Raises:
        ConfigError: the architecture is not a submodel of this network.
    """
    names = network.shapes(architecture)
    indices = {name: list_indices(architecture.make_index_set(name), axis.size) for name, axis in network.axes.items()}
    return _gather_all(network, names, network.whole_sizes(), indices)


def placements(network: Network, architecture: Architecture) -> tuple[Placement, ...]:
    """One placement for each tensor of a submodel, at the tensor with its name, in network order.

    Raises:
        ConfigError: the architecture is not a submodel of this network.
    """
    return tuple(
        Placement(local=name, name=name, map=tensor_map)
        for name, tensor_map in tensor_maps(network, architecture).items()
    )


def nested_maps(network: Network, outer: Architecture, inner: Architecture) -> dict[str, TensorMap]:
    """Maps between the tensors of a larger submodel and those of a submodel inside it, in network order.

    Raises:
        ConfigError: an architecture is not a submodel of this network, or `inner` is not inside `outer`.
    """
    lacking = sorted(network.shapes(inner).keys() - network.shapes(outer).keys())
    if lacking:
        raise ConfigError(f"a nested submodel has the tensor {lacking[0]!r}, which the outer submodel lacks")
    positions = {name: _places(network, outer, inner, name) for name in network.axes}
    return _gather_all(network, network.shapes(inner), network.sizes(outer), positions)


def _places(network: Network, outer: Architecture, inner: Architecture, axis: str) -> Sequence[int]:
    """The positions of the inner submodel's indices of an axis among those of the outer."""
    size = network.axes[axis].size
    positions = {index: position for position, index in enumerate(list_indices(outer.make_index_set(axis), size))}
    indices = list_indices(inner.make_index_set(axis), size)
    missing = [index for index in indices if index not in positions]
    if missing:
        raise ConfigError(
            f"a nested submodel keeps index {missing[0]} of axis {axis!r}, which the outer submodel lacks; keep less"
        )
    inside = [positions[index] for index in indices]
    whole = range(inside[0], inside[0] + len(inside))
    return whole if inside == list(whole) else inside


def extract(network: Network, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Extract a submodel's tensors from the full network's as contiguous copies.

    Args:
        network: the network.
        architecture: the submodel.
        state: the full network's tensors by name.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
    """
    maps = tensor_maps(network, architecture)
    missing = sorted(maps.keys() - state.keys())
    if missing:
        raise ConfigError(f"the model lacks the tensors {missing} that its network declares")
    return {
        name: tensor_map.extract(state[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor_map in maps.items()
    }


def embed(tensor_map: TensorMap, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A local tensor embedded in zeros of the full shape; extracting it restores every bit."""
    into = local.new_zeros(shape)
    tensor_map.scatter(local, into)
    return into


def overwrite(tensor_map: TensorMap, local: Tensor, full: Tensor) -> Tensor:
    """A full tensor with the values of a local one at its elements."""
    shape = tuple(full.shape)
    held = embed(tensor_map, torch.ones_like(local), shape)
    return torch.where(held > 0, embed(tensor_map, local, shape), full)


def reduce_to_axes(
    network: Network, decl: TensorDecl, tensor: Tensor, reduce: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Reduce a tensor of the full network to each axis it runs over: yield the axis and its values, (size,).

    Args:
        network: the network.
        decl: the tensor's declaration.
        tensor: its values.
        reduce: reduces (size, other elements) to (size,), such as a sum over the last dimension.
    """
    sizes = network.whole_sizes()
    for factor, values in _reduce_factors(list(chain.from_iterable(decl.factors)), tensor, sizes, reduce):
        if factor in network.axes:
            yield factor, values
            continue
        for begin, end, part in list_parts(network.sums[factor], sizes):
            yield from _reduce_factors(part, values[begin:end], sizes, reduce)


def _reduce_factors(
    factors: Sequence[str | int], tensor: Tensor, sizes: Mapping[str, int], reduce: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    shape = factor_sizes(factors, sizes)
    unfolded = tensor.reshape(shape)
    for dim, factor in enumerate(factors):
        if isinstance(factor, str):
            yield factor, reduce(unfolded.movedim(dim, 0).reshape(shape[dim], -1))


def _gather_all(
    network: Network, names: Iterable[str], sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]
) -> dict[str, TensorMap]:
    """The maps of tensors that keep some indices of each axis; see `_gather_of`."""
    kept = {**indices, **{name: list_sum_indices(parts, sizes, indices) for name, parts in network.sums.items()}}
    tensors = cache(lambda factor: torch.tensor(list(_list_kept(factor, kept))))
    return {name: _gather_of(network.tensors[name], sizes, kept, tensors) for name in names}


def _list_kept(factor: str | int, kept: Mapping[str, Sequence[int]]) -> Sequence[int]:
    return range(factor) if isinstance(factor, int) else kept[factor]


def _gather_of(
    decl: TensorDecl,
    sizes: Mapping[str, int],
    kept: Mapping[str, Sequence[int]],
    tensors: Callable[[str | int], Tensor],
) -> Gather:
    """Create the map that keeps some indices of each axis and sum.

    Args:
        decl: the tensor.
        sizes: sizes of the axes and sums in the tensor that is cut.
        kept: indices of each.
        tensors: returns the kept indices of a factor as a tensor.
    """
    factors = [factor for dim in decl.factors for factor in dim]
    of_factors = [_list_kept(factor, kept) for factor in factors]
    slices = tuple(slice(own.start, own.stop) for own in of_factors if isinstance(own, range))
    shapes = ([-1 if place == at else 1 for place in range(len(factors))] for at in range(len(factors)))
    index = (
        slices
        if len(slices) == len(factors)
        else tuple(tensors(factor).reshape(shape) for factor, shape in zip(factors, shapes, strict=True))
    )
    if len(factors) == len(decl.shape):
        return Gather(index=index)
    return Gather(
        index=index,
        unfolded=factor_sizes(factors, sizes),
        unfolded_local=tuple(map(len, of_factors)),
        local=decl.local_shape({name: len(own) for name, own in kept.items()}),
    )
