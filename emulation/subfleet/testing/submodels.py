"""Submodels for tests of networks, and the elements of the model that they contain."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from subfleet.elastic.axes import Axis, factors_of, list_indices
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture, Centre, Explicit, Full, IndexSet, Prefix, Roll


def draw_submodels(network: Network, count: int = 12, seed: int = 0) -> Iterator[Architecture]:
    """The whole network, the smallest submodel, for each block one without it, and drawn ones; always the same."""
    yield network.full_architecture()
    yield Architecture(axes=tuple((axis.name, _smallest(axis)) for axis in _list_cut_axes(network)))
    names = network.full_architecture().blocks
    for name in names:
        yield tie_axes(network, Architecture(blocks=tuple(other for other in names if other != name)))
    generator = random.Random(seed)  # noqa: S311 - chooses submodels, keeps no secret
    for _ in range(count):
        axes = tuple((axis.name, _draw_index_set(axis, generator)) for axis in _list_cut_axes(network))
        blocks = tuple(name for name in names if generator.random() < 0.5)
        yield tie_axes(network, Architecture(axes=axes, blocks=blocks))


def tie_axes(network: Network, architecture: Architecture) -> Architecture:
    """The submodel with equal indices on axes that left-out blocks tie together: those of the shortest axis."""
    axes = dict(architecture.axes)
    for tied in network.tied_axes(architecture.blocks):
        shortest = min(tied, key=lambda name: network.axes[name].size)
        indices = list_indices(architecture.make_index_set(shortest), network.axes[shortest].size)
        axes |= dict.fromkeys(tied, Explicit(indices=tuple(indices)))
    return replace(architecture, axes=tuple(sorted(axes.items())))


def _list_cut_axes(network: Network) -> list[Axis]:
    return sorted((axis for axis in network.axes.values() if axis.kind != "class"), key=lambda axis: axis.name)


def _smallest(axis: Axis) -> IndexSet:
    return Centre(size=2 - axis.size % 2) if axis.kind == "kernel" else Prefix(size=axis.granularity)


def _draw_index_set(axis: Axis, generator: random.Random) -> IndexSet:
    """Any index set of whole groups; for kernels, a centred one."""
    step, groups = axis.granularity, axis.size // axis.granularity
    if axis.kind == "kernel":
        return Centre(size=2 * generator.randint(0, (axis.size - 1) // 2) + 2 - axis.size % 2)
    size, kind = generator.randint(1, groups), generator.choice(["full", "prefix", "roll", "explicit"])
    if kind == "prefix":
        return Prefix(size=size * step)
    if kind == "roll":
        return Roll(start=generator.randrange(groups) * step, size=size * step)
    if kind == "explicit":
        sampled = generator.sample(range(groups), size)
        return Explicit(indices=tuple(group * step + offset for group in sampled for offset in range(step)))
    return Full()


def have_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bits, including signs of zeros."""
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape and torch.equal(_as_bytes(left[name]), _as_bytes(right[name]))
        for name in left
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def find_held_elements(network: Network, architecture: Architecture) -> dict[str, Tensor]:
    """By tensor of the full model, a mask of the elements that a submodel contains, derived from the axes."""
    return {name: _find_held(network, architecture, name) for name in network.tensors}


def _find_held(network: Network, architecture: Architecture, name: str) -> Tensor:
    decl = network.tensors[name]
    held = torch.full(decl.shape, decl.part is None or decl.part in network.parts_of(architecture))
    for dimension, (dim, size) in enumerate(zip(decl.axes, decl.shape, strict=True)):
        rows = torch.tensor([_keeps_row(network, architecture, factors_of(dim, size), index) for index in range(size)])
        held &= rows.reshape([-1 if other == dimension else 1 for other in range(len(decl.shape))])
    return held


def _keeps_row(network: Network, architecture: Architecture, factors: tuple[str | int, ...], index: int) -> bool:
    """Whether a submodel keeps an index of a dimension; the last factor runs fastest."""
    for factor in reversed(factors):
        size = factor if isinstance(factor, int) else _whole_size(network, factor)
        index, remainder = divmod(index, size)
        if factor in network.sums:
            if not _keeps_in_sum(network, architecture, str(factor), remainder):
                return False
        elif isinstance(factor, str) and not _keeps(architecture.make_index_set(factor), remainder, size):
            return False
    return True


def _keeps_in_sum(network: Network, architecture: Architecture, name: str, index: int) -> bool:
    for part in network.sums[name]:
        size = math.prod(_whole_size(network, factor) for factor in part)
        if index < size:
            return _keeps_row(network, architecture, part, index)
        index -= size
    raise IndexError(f"sum {name!r} has no such index")


def _whole_size(network: Network, factor: str | int) -> int:
    if isinstance(factor, int):
        return factor
    if factor in network.axes:
        return network.axes[factor].size
    return sum(math.prod(_whole_size(network, own) for own in part) for part in network.sums[factor])


def _keeps(index_set: IndexSet, index: int, size: int) -> bool:
    if isinstance(index_set, Prefix):
        return index < index_set.size
    if isinstance(index_set, Roll):
        return (index - index_set.start) % size < index_set.size
    if isinstance(index_set, Centre):
        return 0 <= index - (size - index_set.size) // 2 < index_set.size
    return not isinstance(index_set, Explicit) or index in index_set.indices
