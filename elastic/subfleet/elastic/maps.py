"""Where a submodel's tensors lie in the full network's tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from subfleet.elastic.axes import factors_of, kept_indices
from subfleet.elastic.network import Network, TensorDecl
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

__all__ = ["Gather", "Placement", "TensorMap", "extract", "nested_maps", "placements", "tensor_maps"]


class TensorMap(Protocol):
    """Takes one tensor of the full network to one tensor of a submodel, and sums of local tensors back. Linear."""

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor. It may share memory with `tensor`."""
        ...

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add the local values to `into`, a tensor of the full shape, at the places that they came from."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Selects indices of every factor of every dimension on its own.

    Attributes:
        index: a slice for each factor; or, if any keeps indices that are no slice, an index tensor for each, shaped to
            broadcast against the others.
        unfolded: shape of the full tensor with each product of factors as dimensions of its own; None where there is
            no product.
        kept: the same of the local tensor.
        local: shape of the local tensor.
    """

    index: tuple[slice, ...] | tuple[Tensor, ...]
    unfolded: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None
    local: tuple[int, ...] | None = None

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: a view where all factors are slices and no dimension is a product, else a copy."""
        if self.unfolded is None or self.local is None:
            return tensor[self.index]
        return tensor.reshape(self.unfolded)[self.index].reshape(self.local)

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add `local` to its place in `into`, in place. Every index occurs once, so nothing is added twice."""
        if self.unfolded is None or self.kept is None:
            into[self.index] += local
        else:
            into.view(self.unfolded)[self.index] += local.reshape(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where a tensor of a submodel belongs in the full network. A submodel's tensor may have several places (grafting).

    Attributes:
        local: name of the submodel's tensor.
        name: name of the full network's tensor.
        map: from the one to the other.
    """

    local: str
    name: str
    map: TensorMap


def tensor_maps(network: Network, architecture: Architecture) -> dict[str, TensorMap]:
    """A map for each tensor of a submodel, in network order.

    Raises:
        ConfigError: the architecture is no submodel of this network.
    """
    names = network.shapes(architecture)
    sizes = {name: axis.size for name, axis in network.axes.items()}
    kept = {name: kept_indices(architecture.make_index_set(name), size) for name, size in sizes.items()}
    return {name: _gather_of(network.tensors[name], sizes, kept) for name in names}


def placements(network: Network, architecture: Architecture) -> tuple[Placement, ...]:
    """Every tensor of a submodel at its own place, in network order.

    Raises:
        ConfigError: the architecture is no submodel of this network.
    """
    return tuple(
        Placement(local=name, name=name, map=found) for name, found in tensor_maps(network, architecture).items()
    )


def nested_maps(network: Network, outer: Architecture, inner: Architecture) -> dict[str, TensorMap]:
    """Where the tensors of a submodel lie in those of a larger submodel that holds it, in network order.

    Raises:
        ConfigError: one of the architectures is no submodel of this network, or `outer` lacks something that `inner`
            keeps.
    """
    lacking = sorted(network.shapes(inner).keys() - network.shapes(outer).keys())
    if lacking:
        raise ConfigError(f"a nested submodel holds the tensor {lacking[0]!r}, which the submodel around it lacks")
    places = {name: _places(network, outer, inner, name) for name in network.axes}
    sizes = network.sizes(outer)
    return {name: _gather_of(network.tensors[name], sizes, places) for name in network.shapes(inner)}


def _places(network: Network, outer: Architecture, inner: Architecture, axis: str) -> Sequence[int]:
    """Where the indices that one submodel keeps of an axis stand among those of another."""
    size = network.axes[axis].size
    place_of = {index: place for place, index in enumerate(kept_indices(outer.make_index_set(axis), size))}
    kept = kept_indices(inner.make_index_set(axis), size)
    missing = [index for index in kept if index not in place_of]
    if missing:
        raise ConfigError(
            f"a nested submodel keeps index {missing[0]} of axis {axis!r}, which the one around it lacks; keep less"
        )
    places = [place_of[index] for index in kept]
    whole = range(places[0], places[0] + len(places))
    return whole if places == list(whole) else places


def extract(network: Network, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A submodel's own, contiguous tensors out of the full network's; they share no memory with it.

    Args:
        network: the declaration.
        architecture: the submodel.
        state: the full network's tensors by name.

    Raises:
        ConfigError: the architecture is no submodel of this network, or the state lacks one of its tensors.
    """
    maps = tensor_maps(network, architecture)
    missing = sorted(maps.keys() - state.keys())
    if missing:
        raise ConfigError(f"the model lacks the tensors {missing}, but its network declares them")
    return {
        name: tensor_map.extract(state[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor_map in maps.items()
    }


def _gather_of(decl: TensorDecl, sizes: Mapping[str, int], kept: Mapping[str, Sequence[int]]) -> Gather:
    """A map that keeps the named indices of each axis.

    Args:
        decl: the tensor.
        sizes: of the axes in the tensor that is cut.
        kept: the indices of each axis.
    """
    dims = [factors_of(dim, size) for size, dim in zip(decl.shape, decl.axes, strict=True)]
    factors = [factor for dim in dims for factor in dim]
    indices = [range(factor) if isinstance(factor, int) else kept[factor] for factor in factors]
    index = _index(indices)
    if len(factors) == len(dims):
        return Gather(index=index)
    local = iter(len(found) for found in indices)
    return Gather(
        index=index,
        unfolded=tuple(factor if isinstance(factor, int) else sizes[factor] for factor in factors),
        kept=tuple(len(found) for found in indices),
        local=tuple(math.prod(next(local) for _ in dim) for dim in dims),
    )


def _index(indices: Sequence[Sequence[int]]) -> tuple[slice, ...] | tuple[Tensor, ...]:
    slices = tuple(slice(found.start, found.stop) for found in indices if isinstance(found, range))
    if len(slices) == len(indices):
        return slices
    rank = len(indices)
    return tuple(
        torch.tensor(list(found)).reshape([-1 if place == dimension else 1 for place in range(rank)])
        for dimension, found in enumerate(indices)
    )
