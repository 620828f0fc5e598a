"""Where a subnet's tensors lie in the full network's tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from subfleet.elastic.network import Network, TensorDecl, kept_indices
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Gather", "TensorMap", "extract", "nested_maps", "tensor_maps"]


class TensorMap(Protocol):
    """Takes one tensor of the full network to one tensor of a subnet, and sums of local tensors back. Linear."""

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor. It may share memory with `tensor`."""
        ...

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add the local values to `into`, a tensor of the full shape, at the places that they came from."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Selects indices of every dimension on its own.

    Attributes:
        index: a slice for each dimension; or, if any dimension keeps indices that are no slice, an index tensor for
            each dimension, shaped to broadcast against the others.
    """

    index: tuple[slice, ...] | tuple[Tensor, ...]

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: a view where all dimensions are slices, else a copy."""
        return tensor[self.index]

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add `local` to its place in `into`, in place. Every index occurs once, so nothing is added twice."""
        into[self.index] += local


def tensor_maps(network: Network, spec: SubnetSpec) -> dict[str, TensorMap]:
    """A map for each tensor of a subnet, in network order.

    Raises:
        ConfigError: the spec is no subnet of this network.
    """
    return {name: _gather(network, spec, network.tensors[name]) for name in network.shapes(spec)}


def nested_maps(network: Network, outer: SubnetSpec, inner: SubnetSpec) -> dict[str, TensorMap]:
    """Where the tensors of a subnet lie in those of a larger subnet that holds it, in network order.

    Raises:
        ConfigError: one of the specs is no subnet of this network, or `outer` lacks something that `inner` keeps.
    """
    lacking = sorted(network.shapes(inner).keys() - network.shapes(outer).keys())
    if lacking:
        raise ConfigError(f"a nested subnet holds the tensor {lacking[0]!r}, which the subnet around it lacks")
    places = {name: _places(network, outer, inner, name) for name in network.axes}
    return {
        name: _gather_of(
            [
                range(size) if axis is None else places[axis]
                for size, axis in zip(network.tensors[name].shape, network.tensors[name].axes, strict=True)
            ]
        )
        for name in network.shapes(inner)
    }


def _places(network: Network, outer: SubnetSpec, inner: SubnetSpec, axis: str) -> Sequence[int]:
    """Where the indices that one subnet keeps of an axis stand among those of another."""
    size = network.axes[axis].size
    place_of = {index: place for place, index in enumerate(kept_indices(outer.index_set(axis), size))}
    kept = kept_indices(inner.index_set(axis), size)
    missing = [index for index in kept if index not in place_of]
    if missing:
        raise ConfigError(
            f"a nested subnet keeps index {missing[0]} of axis {axis!r}, which the subnet around it lacks; keep less"
        )
    places = [place_of[index] for index in kept]
    whole = range(places[0], places[0] + len(places))
    return whole if places == list(whole) else places


def extract(network: Network, spec: SubnetSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A subnet's own, contiguous tensors out of the full network's; they share no memory with it.

    Args:
        network: the declaration.
        spec: the subnet.
        state: the full network's tensors by name.

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
    """
    maps = tensor_maps(network, spec)
    missing = sorted(maps.keys() - state.keys())
    if missing:
        raise ConfigError(f"the model lacks the tensors {missing}, but its network declares them")
    return {
        name: tensor_map.extract(state[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor_map in maps.items()
    }


def _gather(network: Network, spec: SubnetSpec, decl: TensorDecl) -> Gather:
    kept = [
        range(size) if axis is None else kept_indices(spec.index_set(axis), size)
        for size, axis in zip(decl.shape, decl.axes, strict=True)
    ]
    return _gather_of(kept)


def _gather_of(kept: Sequence[Sequence[int]]) -> Gather:
    """A map that keeps the named indices of each dimension."""
    slices = tuple(slice(indices.start, indices.stop) for indices in kept if isinstance(indices, range))
    if len(slices) == len(kept):
        return Gather(index=slices)
    rank = len(kept)
    return Gather(
        index=tuple(
            torch.tensor(list(indices)).reshape([-1 if place == dimension else 1 for place in range(rank)])
            for dimension, indices in enumerate(kept)
        )
    )
