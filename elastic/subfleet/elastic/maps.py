"""Maps between the tensors of a submodel and those of the full network."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
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


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptIndices:
    """The indices that a submodel keeps of a factor, in its own order; all tensors that run over the factor share them.

    Attributes:
        size: number of indices of the factor.
        indices: those kept, at least one and each once; a range if they are consecutive.
        is_whole: whether all are kept, in their order; follows from the others.
    """

    size: int
    indices: Sequence[int]
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_whole", self.indices == range(self.size))

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The indices as an array."""
        return np.array(self.indices, np.int64)

    @cached_property
    def tensor(self) -> Tensor:
        """The indices as a tensor; it shares memory with the array."""
        return torch.from_numpy(self.numbers)

    @cached_property
    def runs(self) -> npt.NDArray[np.int64]:
        """(n, 2): the first index of each run of consecutive ones, and its length, in the submodel's order."""
        if isinstance(self.indices, range):
            return np.array([(self.indices.start, len(self.indices))])
        places = np.flatnonzero(self.numbers[1:] != self.numbers[:-1] + 1) + 1
        runs = np.empty((len(places) + 1, 2), np.int64)
        runs[0, 0], runs[1:, 0] = self.numbers[0], self.numbers[places]
        runs[:-1, 1], runs[-1, 1] = places, len(self.indices)
        runs[1:, 1] -= places
        return runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """Selects indices of each factor of each dimension independently.

    Attributes:
        kept: the indices of each factor.
        folded: shape of the local tensor if any dimension is a product; else None.
    """

    kept: tuple[KeptIndices, ...]
    folded: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the full tensor with one dimension for each factor."""
        return tuple([own.size for own in self.kept])

    @property
    def lengths(self) -> tuple[int, ...]:
        """The same of the local tensor."""
        return tuple([len(own.indices) for own in self.kept])

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements of the full tensor from an index of each factor to the next one."""
        return _find_strides(self.sizes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return self.folded or self.lengths

    @property
    def last_cut(self) -> int | None:
        """The last factor whose indices are not all kept in their order; None if all are."""
        for dim in range(len(self.kept) - 1, -1, -1):
            if not self.kept[dim].is_whole:
                return dim
        return None

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the full one."""
        return self.last_cut is None

    @property
    def is_view(self) -> bool:
        """Whether `extract` shares memory with the full tensor, whatever that is."""
        return self.folded is None and all(isinstance(own.indices, range) for own in self.kept)

    @cached_property
    def index(self) -> tuple[slice, ...] | tuple[Tensor, ...]:
        """A slice for each factor; or, if any has none, a tensor for each, shaped to broadcast against the others."""
        slices = tuple(
            slice(own.indices[0], own.indices[-1] + 1) for own in self.kept if isinstance(own.indices, range)
        )
        if len(slices) == len(self.kept):
            return slices
        after = reversed(range(len(self.kept)))
        return tuple(own.tensor.reshape(-1, *[1] * count) for own, count in zip(self.kept, after, strict=True))

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: a view if all factors are slices and no dimension is a product, else a copy."""
        if self.folded is None:
            return tensor[self.index]
        return tensor.reshape(self.sizes)[self.index].reshape(self.folded)

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add `local` to its elements of `into`, in place. Every index occurs once, so nothing is added twice."""
        if self.folded is None:
            into[self.index] += local
        else:
            into.view(self.sizes)[self.index] += local.reshape(self.lengths)


@lru_cache
def _find_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


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
    """The maps of tensors that keep some indices of each axis.

    Args:
        network: the network.
        names: of the tensors.
        sizes: sizes of the axes and sums in the tensors that are cut.
        indices: kept indices of each axis.
    """
    of_sums = {name: list_sum_indices(parts, sizes, indices) for name, parts in network.sums.items()}
    kept = {
        name: KeptIndices(size=sizes[name], indices=_find_range(own)) for name, own in {**indices, **of_sums}.items()
    }
    lengths = {name: len(own.indices) for name, own in kept.items()}

    @cache
    def keep(factor: str | int) -> KeptIndices:
        return kept[factor] if isinstance(factor, str) else KeptIndices(size=factor, indices=range(factor))

    return {name: _gather_of(network.tensors[name], lengths, keep) for name in names}


def _find_range(indices: Sequence[int]) -> Sequence[int]:
    consecutive = range(indices[0], indices[0] + len(indices))
    return consecutive if list(indices) == list(consecutive) else indices


def _gather_of(decl: TensorDecl, lengths: Mapping[str, int], keep: Callable[[str | int], KeptIndices]) -> Gather:
    kept = tuple(map(keep, chain.from_iterable(decl.factors)))
    return Gather(kept=kept, folded=None if len(kept) == len(decl.shape) else decl.local_shape(lengths))
