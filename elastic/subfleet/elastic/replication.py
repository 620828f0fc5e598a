"""Replication: a smaller network inside a larger one, in which each index copies one of the smaller network.

Up (widening): weights that compute an index are copied to all its copies; weights that read it are divided among them,
in equal or other shares, so that they add up to the original. Blocks that the smaller network lacks start as the
identity, which is copied likewise: a layer then passes its input on, however many channels are before and after it. The
larger network then computes the same as the smaller one (Chen, Goodfellow and Shlens, "Net2Net", ICLR 2016, section
2.2).
Down: weights that compute an index are the mean of its copies; weights that read it are their sum. Down after up is the
identity. Up after down moves the larger network to the nearest one that the smaller can express. If the larger network
has grown itself, copies have different shares in a mean, so that down still restores the smaller network.

Net2Net divides by the number of copies of the read index. FedADP's printed rule (section III) counts otherwise and
never divides; it narrows by distributing removed weights among those that stay, which no widening undoes.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.axes import Axis, factor_sizes
from subfleet.elastic.identities import add_identities, check_identity
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.maps import embed
from subfleet.elastic.network import Network, TensorDecl
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Prefix

__all__ = ["Replication"]

_READING: frozenset[str] = frozenset({"weight", "residual"})
"""Roles of tensors with computed indices in the first dimension and read indices in the others."""
_ROUNDING = 1e-6
"""Rounding error of stored shares."""
_DRAWN_SHARES = (0.3, 0.7)
"""Bounds of the drawn share of each copy before the shares of an index are normalised to the sum 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicate:
    """The map of one tensor of a replication; see `subfleet.elastic.maps.TensorMap`.

    Attributes:
        sources: for each factor of each dimension, the local index that each index copies; None if they are the same.
        shares: for each factor, the share of each index among the copies of one, float64 with sum 1 per copied index.
        reads: whether the tensor reads the factor.
        unfolded: shape of the full tensor with one dimension for each factor.
        unfolded_local: the same shape of the local tensor.
        local: shape of the local tensor.
    """

    sources: tuple[Tensor | None, ...]
    shares: tuple[Tensor | None, ...]
    reads: tuple[bool, ...]
    unfolded: tuple[int, ...]
    unfolded_local: tuple[int, ...]
    local: tuple[int, ...]

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: means over the copies of computed indices, sums over the copies of read indices."""
        result = tensor.reshape(self.unfolded).double()
        for dim, source, share, reads in self._iterate_copies(result.device):
            shape = [*result.shape]
            shape[dim] = self.unfolded_local[dim]
            counted = result if reads else result * _along(share, dim, result.dim())
            result = result.new_zeros(shape).index_add_(dim, source, counted)
        return result.reshape(self.local).to(tensor.dtype)

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add to a full tensor: computed indices to every copy, and read indices by the copy's share."""
        result = local.reshape(self.unfolded_local).double()
        for dim, source, share, reads in self._iterate_copies(result.device):
            copied = result.index_select(dim, source)
            result = copied * _along(share, dim, result.dim()) if reads else copied
        into.view(self.unfolded).add_(result.to(into.dtype))

    def _iterate_copies(self, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
        """Yield each dimension with copies, the index that each index copies, its share, and whether it is read."""
        for dim, (source, share, reads) in enumerate(zip(self.sources, self.shares, self.reads, strict=True)):
            if source is not None and share is not None:
                yield dim, source.to(device), share.to(device), reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """The position of a smaller network in a larger one; an `Exchange` between a client's network and the model.

    Attributes:
        network: the larger network.
        size: the smaller network as a submodel of the larger, at the front of every axis.
        sources: for each axis of another size, the index of the smaller network that each index copies. In an axis with
            groups, whole groups are copied.
        shares: by axis, the share of each index among the copies of one, above 0 with sum 1; equal for unnamed axes.

    Raises:
        ConfigError: an axis of another size is not named; an index of the smaller network has no copy; groups are
            split; an axis that is normalised as a whole has unequal numbers of copies; a product of computed values
            sums over the axis, which no weight can compensate; a missing block cannot be the identity; or shares do not
            match the sources.
    """

    network: Network
    size: Architecture
    sources: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        self.network.check(self.size)
        if self.network.sums:
            raise ConfigError(
                "a network that reads several outputs one after another cannot grow by copies; let it grow without "
                "copies, or choose a network that adds outputs"
            )
        sizes = self.network.sizes(self.size)
        lacking = sorted(name for name in sizes if sizes[name] != self.network.axes[name].size)
        if sorted(self.sources) != lacking:
            raise ConfigError(
                f"a replication names the axes {sorted(self.sources)}, but those of another size are {lacking}"
            )
        for name, source in self.sources.items():
            _check_source(self.network.axes[name], sizes[name], source)
            _check_norm(self.network, name, source)
        for name, share in self.shares.items():
            _check_shares(name, self.sources.get(name, ()), share)
        for name in self.lacking:
            check_identity(self.network, name)

    @classmethod
    def draw(cls, network: Network, size: Architecture, stream: random.Random) -> "Replication":
        """Draw the copies at random; the indices of the smaller network come first.

        Copies are drawn in rounds through all indices or groups, so none has two more copies than another, and norms
        over a whole axis keep their statistics if its size is a multiple.
        """
        sizes = network.sizes(size)
        sources = {
            name: _draw_source(axis, sizes[name], stream)
            for name, axis in network.axes.items()
            if sizes[name] < axis.size
        }
        return cls(network=network, size=size, sources=MappingProxyType(sources))

    @classmethod
    def cycle(cls, network: Network, size: Architecture) -> "Replication":
        """Copy the indices of the smaller network cyclically.

        For sizes that are whole multiples of each other, copies of copies are then the same as copies.
        """
        sizes = network.sizes(size)
        axes = {name: axis for name, axis in network.axes.items() if sizes[name] < axis.size}
        sources = {name: tuple(index % sizes[name] for index in range(axis.size)) for name, axis in axes.items()}
        return cls(network=network, size=size, sources=MappingProxyType(sources))

    @classmethod
    def of(cls, network: Network, parent: Network, how: Replicated) -> "Replication":
        """Create the replication by which a network grew from its parent.

        Raises:
            ConfigError: the parent is not a submodel of the network, or the map does not fit the two.
        """
        sources, shares = MappingProxyType(dict(how.sources)), MappingProxyType(dict(how.shares))
        return cls(network=network, size=size_in(network, parent), sources=sources, shares=shares)

    def draw_shares(self, stream: random.Random) -> "Replication":
        """Draw the shares of the same copies: of two copies, each has 0.3 to 0.7.

        Copies with equal shares have equal gradients and stay equal. The gradient of a copy is proportional to its
        share, so copies with different shares diverge in training although they are equal at first.
        """
        shares = {}
        for axis, source in self.sources.items():
            drawn = [stream.uniform(*_DRAWN_SHARES) for _ in source]
            sums = dict.fromkeys(source, 0.0)
            for index, part in zip(source, drawn, strict=True):
                sums[index] += part
            shares[axis] = tuple(part / sums[index] for index, part in zip(source, drawn, strict=True))
        return replace(self, shares=MappingProxyType(shares))

    @property
    def key(self) -> str:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return canonical_json(
            [sorted(self.sources.items()), sorted(self.shares.items()), self.size.architecture_id]
        ).decode()

    def share_of(self, axis: str) -> tuple[float, ...]:
        """The share of each index of an axis with copies among the copies of one index."""
        counts = Counter(self.sources[axis])
        return self.shares.get(axis) or tuple(1 / counts[index] for index in self.sources[axis])

    @property
    def lacking(self) -> tuple[str, ...]:
        """Blocks that only the larger network has, in network order."""
        return tuple(block.name for block in self.network.blocks if block.name not in self.size.blocks)

    @property
    def moved(self) -> Architecture:
        """The part of the larger network that a change of the smaller moves: whole axes and the smaller's blocks."""
        return Architecture(blocks=self.size.blocks, name=self.size.name, network=self.network.id)

    def maps(self) -> dict[str, Replicate]:
        """The map of each tensor of the smaller network, in network order."""
        return self._maps(self.size)

    def grow(self, local: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the larger network that computes the same as the smaller one.

        Args:
            local: the smaller network's tensors.
            first: first weights of the larger network, for blocks that the smaller lacks; these become the identity.
        """
        whole = replace(self.size, blocks=tuple(block.name for block in self.network.blocks))
        small = add_identities(self.network, self.lacking, self.network.shapes(whole), local)
        grown = {**first, **self._up(self._maps(whole), small)}
        return {name: grown[name] for name in self.network.tensors}

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map all or some of the smaller network's tensors, or changes, to the larger network, in its order."""
        return self._up(self.maps(), change)

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map the larger network's tensors, or changes, to the smaller network."""
        return {name: tensor_map.extract(state[name]) for name, tensor_map in self.maps().items()}

    def _up(self, maps: Mapping[str, Replicate], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: embed(tensor_map, change[name], self.network.tensors[name].shape)
            for name, tensor_map in maps.items()
            if name in change
        }

    def _maps(self, size: Architecture) -> dict[str, Replicate]:
        sizes, shapes = self.network.sizes(size), self.network.shapes(size)
        return {name: self._map(self.network.tensors[name], shape, sizes) for name, shape in shapes.items()}

    def _map(self, decl: TensorDecl, local: tuple[int, ...], sizes: Mapping[str, int]) -> Replicate:
        factors = [factor for dim in decl.factors for factor in dim]
        named = [factor if isinstance(factor, str) and factor in self.sources else None for factor in factors]
        return Replicate(
            sources=tuple(None if axis is None else torch.tensor(self.sources[axis]) for axis in named),
            shares=tuple(
                None if axis is None else torch.tensor(self.share_of(axis), dtype=torch.float64) for axis in named
            ),
            reads=tuple(index > 0 and decl.role in _READING for index, dim in enumerate(decl.factors) for _ in dim),
            unfolded=factor_sizes(factors, self.network.whole_sizes()),
            unfolded_local=factor_sizes(factors, sizes),
            local=local,
        )


def is_replicable(network: Network, size: Architecture) -> bool:
    """Whether a network can grow from a submodel by copies and by blocks that are the identity."""
    try:
        Replication.cycle(network, size)
    except ConfigError:
        return False
    return True


def size_in(network: Network, smaller: Network) -> Architecture:
    """The architecture of a network as a submodel of a larger one of the same family.

    If only one of them has widths of layers, the layers of the other have the widths of their sections.

    Raises:
        ConfigError: the larger network lacks a block or an axis, has a smaller axis or another order of blocks, or the
            tensors differ in more than the sizes of axes.
    """
    blocks = [block.name for block in network.blocks]
    own_blocks = [block.name for block in smaller.blocks]
    lacking = [name for name in own_blocks if name not in blocks]
    sizes = _sizes_in(network, smaller)
    beyond = [name for name, size in sizes.items() if size > network.axes[name].size]
    if lacking or beyond:
        raise ConfigError(
            f"a network is not a submodel of the larger one: {(lacking + beyond)[0]!r} is missing or smaller there"
        )
    ordered = tuple(name for name in blocks if name in own_blocks)
    if list(ordered) != own_blocks:
        raise ConfigError(
            f"a network is not a submodel of the larger one: its blocks are {own_blocks}, but there the order is "
            f"{list(ordered)}"
        )
    axes = tuple((name, Prefix(size=size)) for name, size in sorted(sizes.items()) if size < network.axes[name].size)
    size = Architecture(axes=axes, blocks=ordered, network=network.id)
    network.check(size)
    shapes = network.shapes(size)
    own = {name: decl.shape for name, decl in smaller.tensors.items()}
    if shapes != own:
        odd = sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name))
        raise ConfigError(
            f"a network is not a submodel of the larger one: tensor {odd[0]!r} has the shape {own.get(odd[0])}, but as "
            f"a submodel it would have {shapes.get(odd[0])}"
        )
    return size


def _sizes_in(network: Network, smaller: Network) -> dict[str, int]:
    """The size of each axis of the larger network in the smaller one, as far as known."""
    known = {name: axis.size for name, axis in smaller.axes.items() if name in network.axes}
    for name, decl in smaller.tensors.items():
        own = network.tensors.get(name)
        if own is not None and len(own.shape) == len(decl.shape):
            alone = zip(own.axes, decl.shape, strict=True)
            known |= {axis: size for axis, size in alone if isinstance(axis, str) and axis not in network.sums}
    for block in network.blocks:  # a missing block passes its input on
        if block.gives and block.gives not in known and block.reads in known:
            known[block.gives] = known[block.reads]
    return known


def _draw_source(axis: Axis, size: int, stream: random.Random) -> tuple[int, ...]:
    step = axis.granularity
    groups, count = [*range(size // step)], axis.size // step
    source = [*groups]
    while len(source) < count:
        source += stream.sample(groups, min(len(groups), count - len(source)))
    return tuple(group * step + offset for group in source for offset in range(step))


def _check_source(axis: Axis, size: int, source: Sequence[int]) -> None:
    step = axis.granularity
    groups = [list(source[first : first + step]) for first in range(0, len(source), step)]
    if not axis.copied:
        raise ConfigError(
            f"axis {axis.name!r} cannot be copied, because its indices are combined, for example normalised together, "
            "or read by a tensor in which growth expects others; keep its size"
        )
    whole = all(group[0] % step == 0 and group == [*range(group[0], group[0] + step)] for group in groups)
    if axis.kind in ("class", "kernel") or len(source) != axis.size or set(source) != set(range(size)) or not whole:
        raise ConfigError(
            f"axis {axis.name!r} of kind {axis.kind!r} has {axis.size} indices in aligned groups of {step} that must "
            f"copy each of {size} indices, but {len(source)} copy {len(set(source))}; axes of kind 'class' or 'kernel' "
            "cannot be copied"
        )


def _check_shares(axis: str, source: Sequence[int], share: Sequence[float]) -> None:
    sums = dict.fromkeys(source, 0.0)
    for index, part in zip(source, share, strict=False):
        sums[index] += part
    if len(source) != len(share) or min(share) <= 0 or any(abs(total - 1) > _ROUNDING for total in sums.values()):
        raise ConfigError(
            f"the shares of the copies of each index of axis {axis!r} ({len(source)} indices) must be above 0 with sum "
            f"1, but there are {len(share)} shares with sums from {min(sums.values(), default=0):g} to "
            f"{max(sums.values(), default=0):g}"
        )


def _along(values: Tensor, dim: int, rank: int) -> Tensor:
    """A value for each index of a dimension, shaped to broadcast."""
    return values.reshape([-1 if other == dim else 1 for other in range(rank)])


def _check_norm(network: Network, axis: str, source: Sequence[int]) -> None:
    counts = Counter(source)
    if network.axes[axis].evenly and len(set(counts.values())) > 1:
        raise ConfigError(
            f"axis {axis!r} is normalised as a whole, so its {len(counts)} indices must have equally many copies, but "
            f"{len(source)} is not a multiple; enlarge it by a whole factor"
        )
