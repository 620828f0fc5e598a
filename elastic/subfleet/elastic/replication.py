"""A smaller network inside a larger one, each of whose indices copies one of the smaller's: widening, and the way back.

Up: what computes an index is copied to all that copy it; what reads an index is divided among them, in equal shares or
in others, so that they add up to what the one gave. Blocks that the smaller network lacks start as the identity, which
is copied likewise: a layer then passes on what it reads, however many channels the larger network has before and behind
it. The larger network then computes what the smaller one does (Chen, Goodfellow and Shlens, "Net2Net", ICLR 2016,
section 2.2).
Down: what computes an index is the mean of its copies; what reads it is their sum. Down after up is the identity, and
up after down moves the larger network to the nearest that the smaller one can be. Where the larger network has itself
become larger since, copies are of different shares in a mean, so that what comes down is what it was.

Net2Net divides by the copies of the index that is read. FedADP's printed rule (section III) counts otherwise and never
divides; and it narrows by sharing out what is cut among what stays, which no widening undoes.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.axes import Axis, factors_of
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.families.sections import layer_axis
from subfleet.elastic.identities import add_identities, can_be_identity, check_identity
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.network import Network, TensorDecl
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Prefix

__all__ = ["Replicate", "Replication", "is_replicable", "size_in"]

_READING: frozenset[str] = frozenset({"weight", "residual"})
"""Roles of tensors whose first dimension is what they compute and whose others are what they read."""
_ROUNDING = 1e-6
"""Of shares that are stored."""
_DRAWN_SHARES = (0.3, 0.7)
"""Bounds of what is drawn for each copy before the copies of one are brought to the sum 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicate:
    """One tensor's part of a replication; see `subfleet.elastic.maps.TensorMap`.

    Attributes:
        sources: for each factor of each dimension, the local index that each index copies; None where they are alike.
        shares: of these, how much each index counts among the copies of one, float64 and with sum 1 over these.
        reads: whether the factor is what the tensor reads.
        unfolded: shape of the full tensor with each product of factors as dimensions of its own.
        kept: the same of the local tensor.
        local: shape of the local tensor.
    """

    sources: tuple[Tensor | None, ...]
    shares: tuple[Tensor | None, ...]
    reads: tuple[bool, ...]
    unfolded: tuple[int, ...]
    kept: tuple[int, ...]
    local: tuple[int, ...]

    def extract(self, tensor: Tensor) -> Tensor:
        """The local tensor: means over the copies of what is computed, sums over those of what is read."""
        found = tensor.reshape(self.unfolded).double()
        for dim, source, share, reads in self._iterate_copies(found.device):
            shape = [*found.shape]
            shape[dim] = self.kept[dim]
            counted = found if reads else found * _along(share, dim, found.dim())
            found = found.new_zeros(shape).index_add_(dim, source, counted)
        return found.reshape(self.local).to(tensor.dtype)

    def scatter(self, local: Tensor, into: Tensor) -> None:
        """Add to a full tensor: to every copy what is computed, and its share of what is read."""
        found = local.reshape(self.kept).double()
        for dim, source, share, reads in self._iterate_copies(found.device):
            copied = found.index_select(dim, source)
            found = copied * _along(share, dim, found.dim()) if reads else copied
        into.view(self.unfolded).add_(found.to(into.dtype))

    def _iterate_copies(self, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
        """The dimensions that have copies: which, what each index copies, its share, and whether it is read."""
        for dim, (source, share, reads) in enumerate(zip(self.sources, self.shares, self.reads, strict=True)):
            if source is not None and share is not None:
                yield dim, source.to(device), share.to(device), reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Where a smaller network lies in a larger one; an `Exchange` between a client's network and the model.

    Attributes:
        network: the larger one.
        size: the smaller one, as a size of the larger: kept at the front of every axis.
        sources: by axis that differs in size, the index of the smaller that each index of the larger copies. Of an axis
            that keeps aligned groups, whole groups are copied.
        shares: by axis, how much each of its indices counts among the copies of one, above 0 and with sum 1 over these;
            of an axis that is not named, all alike.

    Raises:
        ConfigError: an axis of another size is not named, an index of the smaller has no copy, groups are split, one of
            a stream that is normalised as a whole has more copies than another, or a product of computed values sums
            over the axis, which no weight can make up for; or a block that the smaller one lacks cannot be the
            identity; or shares are not those of the sources.
    """

    network: Network
    size: Architecture
    sources: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        self.network.check(self.size)
        sizes = self.network.sizes(self.size)
        lacking = sorted(name for name in sizes if sizes[name] != self.network.axes[name].size)
        if sorted(self.sources) != lacking:
            raise ConfigError(
                f"a replication names the axes {sorted(self.sources)}, but those of another size are {lacking}"
            )
        for name, source in self.sources.items():
            _check_source(self.network.axes[name], sizes[name], source)
            _check_sums(self.network, name)
            _check_norm(self.network, name, source)
        for name, share in self.shares.items():
            _check_shares(name, self.sources.get(name, ()), share)
        for name in self.lacking:
            check_identity(self.network, name)

    @classmethod
    def drawn(cls, network: Network, size: Architecture, stream: random.Random) -> "Replication":
        """One in which every index of the smaller network comes first, and the rest are copies that are drawn.

        Copies are drawn in rounds through all indices, or groups of an axis that keeps such: none has two more than
        another, so that norms over a whole axis measure what they did wherever its size is a multiple.
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
        """One in which the indices of the larger network copy those of the smaller in turn, again and again.

        Of sizes that are whole multiples of each other, copies of copies are then the same as copies.
        """
        sizes = network.sizes(size)
        axes = {name: axis for name, axis in network.axes.items() if sizes[name] < axis.size}
        sources = {name: tuple(place % sizes[name] for place in range(axis.size)) for name, axis in axes.items()}
        return cls(network=network, size=size, sources=MappingProxyType(sources))

    @classmethod
    def of(cls, network: Network, parent: Network, how: Replicated) -> "Replication":
        """The one by which a network grew from its parent.

        Raises:
            ConfigError: the parent is no size of the network, or the map does not fit the two.
        """
        sources, shares = MappingProxyType(dict(how.sources)), MappingProxyType(dict(how.shares))
        return cls(network=network, size=size_in(network, parent), sources=sources, shares=shares)

    def draw_shares(self, stream: random.Random) -> "Replication":
        """The same copies, of shares that are drawn: of two copies, each has 0.3 to 0.7.

        Copies of equal shares have equal gradients, and stay copies for ever. A copy's gradient is as large as its
        share, so that copies of different shares part in training, though they are equal at first.
        """
        shares = {}
        for axis, source in self.sources.items():
            drawn = [stream.uniform(*_DRAWN_SHARES) for _ in source]
            sums = dict.fromkeys(source, 0.0)
            for one, part in zip(source, drawn, strict=True):
                sums[one] += part
            shares[axis] = tuple(part / sums[one] for one, part in zip(source, drawn, strict=True))
        return replace(self, shares=MappingProxyType(shares))

    @property
    def key(self) -> str:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return canonical_json(
            [sorted(self.sources.items()), sorted(self.shares.items()), self.size.architecture_id]
        ).decode()

    def share_of(self, axis: str) -> tuple[float, ...]:
        """How much each index of an axis that has copies counts among those of one."""
        counts = Counter(self.sources[axis])
        return self.shares.get(axis) or tuple(1 / counts[one] for one in self.sources[axis])

    @property
    def lacking(self) -> tuple[str, ...]:
        """Blocks of the larger network that the smaller one has not, in network order."""
        return tuple(block.name for block in self.network.blocks if block.name not in self.size.blocks)

    @property
    def moved(self) -> Architecture:
        """What of the larger network the smaller one's change moves: all of every axis, and its own blocks."""
        return Architecture(blocks=self.size.blocks, name=self.size.name, network=self.network.id)

    def maps(self) -> dict[str, Replicate]:
        """A map for each tensor of the smaller network, in network order."""
        return self._maps(self.size)

    def grow(self, local: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The larger network that computes what the smaller one does.

        Args:
            local: the smaller network's tensors.
            first: the larger network's first weights, of which the blocks are taken that the smaller one lacks, as
                the identity.
        """
        whole = replace(self.size, blocks=tuple(block.name for block in self.network.blocks))
        small = add_identities(self.network, self.lacking, self.network.shapes(whole), local)
        found = {**first, **self._up(self._maps(whole), small)}
        return {name: found[name] for name in self.network.tensors}

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What all or some of the smaller network's tensors, or their changes, are in the larger one, in its order."""
        return self._up(self.maps(), change)

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The smaller network's tensors out of the larger one's, or changes likewise."""
        return {name: one.extract(state[name]) for name, one in self.maps().items()}

    def _up(self, maps: Mapping[str, Replicate], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, one in maps.items():
            if name in change:
                local = change[name]
                found[name] = local.new_zeros(self.network.tensors[name].shape)
                one.scatter(local, found[name])
        return found

    def _maps(self, size: Architecture) -> dict[str, Replicate]:
        sizes, shapes = self.network.sizes(size), self.network.shapes(size)
        return {name: self._map(self.network.tensors[name], shape, sizes) for name, shape in shapes.items()}

    def _map(self, decl: TensorDecl, local: tuple[int, ...], sizes: Mapping[str, int]) -> Replicate:
        dims = [factors_of(dim, size) for size, dim in zip(decl.shape, decl.axes, strict=True)]
        factors = [(factor, place) for place, dim in enumerate(dims) for factor in dim]
        named = [factor if isinstance(factor, str) and factor in self.sources else None for factor, _ in factors]
        axes = self.network.axes
        return Replicate(
            sources=tuple(None if axis is None else torch.tensor(self.sources[axis]) for axis in named),
            shares=tuple(
                None if axis is None else torch.tensor(self.share_of(axis), dtype=torch.float64) for axis in named
            ),
            reads=tuple(place > 0 and decl.role in _READING for _, place in factors),
            unfolded=tuple(one if isinstance(one, int) else axes[one].size for one, _ in factors),
            kept=tuple(one if isinstance(one, int) else sizes[one] for one, _ in factors),
            local=local,
        )


def is_replicable(network: Network, size: Architecture) -> bool:
    """Whether a network can be made of one of its sizes by copies and by blocks that compute nothing."""
    sizes = network.sizes(size)
    shorter = {name for name, axis in network.axes.items() if sizes[name] != axis.size}
    whole = {
        name
        for name, axis in network.axes.items()
        if network.config.norm == "layer" and axis.kind == "embed" and axis.size % sizes[name]
    }
    summed = {name for product in network.products for name in product.summed if isinstance(name, str)}
    kernels = {name for name in shorter if network.axes[name].kind == "kernel"}
    lacking = (block.name for block in network.blocks if block.name not in size.blocks)
    return not (shorter & (summed | whole | kernels)) and all(can_be_identity(network, name) for name in lacking)


def size_in(network: Network, smaller: Network) -> Architecture:
    """A network as a size of a larger one of the same family.

    Where one of the two has widths of layers and the other of sections, the latter's layers have those.

    Raises:
        ConfigError: the larger one lacks a block or an axis of it, has it smaller, or has its blocks in another order;
            or their tensors differ in more than sizes of axes.
    """
    blocks = [block.name for block in network.blocks]
    own_blocks = [block.name for block in smaller.blocks]
    lacking = [name for name in own_blocks if name not in blocks]
    sizes = _sizes_in(network, smaller)
    beyond = [name for name, size in sizes.items() if size > network.axes[name].size]
    if lacking or beyond:
        raise ConfigError(f"a network is no size of another, which lacks {(lacking + beyond)[0]!r} or has less of it")
    kept = tuple(name for name in blocks if name in own_blocks)
    if list(kept) != own_blocks:
        raise ConfigError(
            f"a network is no size of another: its blocks are {own_blocks}, which stand there as {list(kept)}"
        )
    axes = tuple((name, Prefix(size=size)) for name, size in sorted(sizes.items()) if size < network.axes[name].size)
    size = Architecture(axes=axes, blocks=kept, network=network.id)
    network.check(size)
    shapes = network.shapes(size)
    own = {name: decl.shape for name, decl in smaller.tensors.items()}
    if shapes != own:
        odd = sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name))
        raise ConfigError(
            f"a network is no size of another: the tensor {odd[0]!r} is {own.get(odd[0])} in the one and would be "
            f"{shapes.get(odd[0])} in the other"
        )
    return size


def _sizes_in(network: Network, smaller: Network) -> dict[str, int]:
    """How many indices a smaller network has of each axis that it says something of."""
    found = {name: axis.size for name, axis in smaller.axes.items() if name in network.axes}
    for section, numbers in enumerate(block_numbers(network.config)):
        stream, layers = f"section{section}.stream", [layer_axis(section, number) for number in numbers]
        if stream in smaller.axes:
            found |= {layer: smaller.axes[stream].size for layer in layers if layer in network.axes}
        elif stream in network.axes:
            own = {smaller.axes[layer].size for layer in layers if layer in smaller.axes}
            if len(own) > 1:
                raise ConfigError(
                    f"a network is no size of another: its layers of section {section} give {sorted(own)} channels, "
                    "but there all give as many; give the other one layer_widths"
                )
            if own:
                found[stream] = own.pop()
    for block in network.blocks:  # what a lacking one would have read is passed on
        if block.gives and block.gives not in found and block.reads in found:
            found[block.gives] = found[block.reads]
    return found


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
    whole = all(group[0] % step == 0 and group == [*range(group[0], group[0] + step)] for group in groups)
    if axis.kind in ("class", "kernel") or len(source) != axis.size or set(source) != set(range(size)) or not whole:
        raise ConfigError(
            f"axis {axis.name!r} of kind {axis.kind!r} has {axis.size} indices in aligned groups of {step}, which must "
            f"copy every one of {size}, but {len(source)} are said to copy {len(set(source))}; no axis of kind 'class' "
            "or 'kernel' can be copied"
        )


def _check_shares(axis: str, source: Sequence[int], share: Sequence[float]) -> None:
    sums = dict.fromkeys(source, 0.0)
    for one, part in zip(source, share, strict=False):
        sums[one] += part
    if len(source) != len(share) or min(share) <= 0 or any(abs(one - 1) > _ROUNDING for one in sums.values()):
        raise ConfigError(
            f"axis {axis!r} has {len(source)} indices whose copies must have shares above 0 with sum 1, but it has "
            f"{len(share)} of sums from {min(sums.values(), default=0):g} to {max(sums.values(), default=0):g}"
        )


def _along(values: Tensor, dim: int, rank: int) -> Tensor:
    """A value for each index of a dimension, shaped to broadcast."""
    return values.reshape([-1 if place == dim else 1 for place in range(rank)])


def _check_norm(network: Network, axis: str, source: Sequence[int]) -> None:
    counts = Counter(source)
    if network.config.norm == "layer" and network.axes[axis].kind == "embed" and len(set(counts.values())) > 1:
        raise ConfigError(
            f"axis {axis!r} is normalised as a whole, so that all of its {len(counts)} indices must have as many "
            f"copies, but {len(source)} are no multiple; make it larger by a whole factor"
        )


def _check_sums(network: Network, axis: str) -> None:
    if any(axis in product.summed for product in network.products):
        raise ConfigError(
            f"axis {axis!r} is summed over in a product of computed values, such as of queries with keys, so that no "
            "copy of it leaves the outputs as they are"
        )
