"""Weights along a lineage: the first weights of a network that grew from another, and maps between the two later."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Generator, Tensor, ones_like, randn, tensor, where, zeros_like

from subfleet.elastic.building import init_state
from subfleet.elastic.lineage import Chosen, Copied, Drawn, Inheritance, Placed, Replicated
from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.protocol.errors import ConfigError


def inherit(
    how: Inheritance, network: Network, parent: Network, weights: Mapping[str, Tensor], *, seed: int
) -> dict[str, Tensor]:
    """The weights that a network begins with, on the device of its parent's.

    Args:
        how: the map from its parent's weights.
        network: the declaration of the new one.
        parent: the declaration of the one that it grew from.
        weights: the parent's.
        seed: of the run, for what is drawn.

    Raises:
        ConfigError: the map does not fit the two networks.
    """
    if isinstance(how, Copied):
        return _copy(network, parent, weights)
    if isinstance(how, Chosen):
        return _choose(network, parent, weights)
    like = next(iter(weights.values()))
    first = {name: tensor.to(like) for name, tensor in init_state(network, seed).items()}
    if isinstance(how, Drawn):
        return first
    if isinstance(how, Placed):
        return embed_weights(network, parent, weights, first)
    replication = Replication.of(network, parent, how)
    grown = replication.grow(weights, first)
    if how.divided == "compute":
        grown = _divide_copies(replication, grown)
    return _add_noise(network, how, grown, seed) if how.noise else grown


def embed_weights(
    network: Network, parent: Network, weights: Mapping[str, Tensor], around: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of a larger network with those of a smaller one in front of every axis.

    Args:
        network: the declaration of the larger one.
        parent: the declaration of the smaller one.
        weights: some or all of the smaller one's.
        around: the larger one's, of which all else is taken.

    Returns:
        Those of the larger one whose names `around` has.

    Raises:
        ConfigError: the smaller one is no size of the larger one.
    """
    found = dict(around)
    for name, place in tensor_maps(network, size_in(network, parent)).items():
        if name in weights and name in around:
            inside, held = zeros_like(around[name]), zeros_like(around[name])
            place.scatter(weights[name], inside)
            place.scatter(ones_like(weights[name]), held)
            found[name] = where(held > 0, inside, around[name])
    return found


def _divide_copies(replication: Replication, grown: dict[str, Tensor]) -> dict[str, Tensor]:
    """With what computes copies divided among them, and what reads them as it was (FedTrans, section 4.1)."""
    found = dict(grown)
    for name, place in replication.maps().items():
        if replication.network.tensors[name].role not in ("weight", "residual"):
            continue
        tensor = grown[name].reshape(place.unfolded).double()
        for dim, (share, reads) in enumerate(zip(place.shares, place.reads, strict=True)):
            if share is not None:
                along = share.to(tensor.device).reshape([-1 if one == dim else 1 for one in range(tensor.dim())])
                tensor = tensor / along if reads else tensor * along
        found[name] = tensor.reshape(grown[name].shape).to(grown[name].dtype)
    return found


def _add_noise(network: Network, how: Replicated, grown: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """With noise in what computes copies, but for the first of each."""
    copies = {
        axis: [place for place, one in enumerate(source) if one in source[:place]] for axis, source in how.sources
    }
    found = dict(grown)
    for name, decl in network.tensors.items():
        again = copies.get(str(decl.axes[0])) if decl.role == "weight" else None
        if again:
            digest = hashlib.sha256(f"{seed}/{network.id}/{name}/noise".encode()).digest()
            generator = Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            drawn = randn(len(again), *decl.shape[1:], generator=generator).to(grown[name])
            found[name] = grown[name].clone()
            found[name][tensor(again)] += how.noise * grown[name].std() * drawn
    return found


def _copy(network: Network, parent: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if network.config != parent.config:
        raise ConfigError(
            f"network {network.id!r} has other settings than its parent {parent.id!r}, so that its weights cannot be "
            "copied; name a map"
        )
    return {name: tensor.clone() for name, tensor in weights.items()}


def _choose(network: Network, parent: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    declared = {name: decl.shape for name, decl in parent.tensors.items()}
    odd = [name for name, decl in network.tensors.items() if declared.get(name) != decl.shape]
    if odd:
        raise ConfigError(
            f"network {network.id!r} is to have tensor {odd[0]!r} of {parent.id!r}, which has none of that shape"
        )
    return {name: weights[name].clone() for name in network.tensors}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedTensor:
    """A tensor of one network in the shape of another.

    Attributes:
        values: float64 values in the other network's shape.
        held: 1 at the elements that come from the first network, else 0; None if all do.
    """

    values: Tensor
    held: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """Maps weights between a parent and the network that grew from it, in both directions.

    Attributes:
        child: the grown network.
        maps: maps of the parent's tensors into the child's, by name.
        everywhere: whether each index of the child copies one of the parent's.
    """

    child: Network
    maps: Mapping[str, TensorMap]
    everywhere: bool

    @classmethod
    def of(cls, child: Network, parent: Network, how: Inheritance, share: Literal["transform", "crop"]) -> "Descent":
        """Create the maps between a parent and its child.

        Args:
            child: the grown network.
            parent: the network that it grew from.
            how: the map by which it grew.
            share: "transform" uses that map where it has copies; "crop" puts the parent at the front of every axis, as
                in HeteroFL, and everything beyond is not the parent's.

        Raises:
            ConfigError: the parent is not a submodel of the child.
        """
        if share == "transform" and isinstance(how, Replicated):
            return cls(child=child, maps=Replication.of(child, parent, how).maps(), everywhere=True)
        return cls(child=child, maps=tensor_maps(child, size_in(child, parent)), everywhere=False)

    def down(self, name: str, parent: MappedTensor) -> MappedTensor:
        """Map a tensor of the parent into the child."""
        if parent.values.shape == self.child.tensors[name].shape:  # axes only grow, so all are equal
            return parent
        values, held = self._embed(name, parent.values), parent.held
        if held is None and not self.everywhere:
            held = ones_like(parent.values)
        return MappedTensor(values=values, held=None if held is None else self._embed(name, held).gt(0).double())

    def up(self, name: str, child: MappedTensor) -> MappedTensor:
        """Map a tensor of the child, which the parent has, into the parent."""
        tensor_map = self.maps[name]
        held = None if child.held is None else tensor_map.extract(child.held).gt(0).double()
        return MappedTensor(values=tensor_map.extract(child.values), held=held)

    def _embed(self, name: str, local: Tensor) -> Tensor:
        into = local.new_zeros(self.child.tensors[name].shape)
        self.maps[name].scatter(local, into)
        return into
