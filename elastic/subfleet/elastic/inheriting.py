"""Weights along a lineage: the first weights of a network that grew from another, and maps between the two later."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Generator, Tensor, ones_like, randn, tensor

from subfleet.elastic.building import init_state
from subfleet.elastic.lineage import Chosen, Copied, Drawn, Inheritance, Placed, Replicated
from subfleet.elastic.maps import TensorMap, embed, overwrite, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.protocol.errors import ConfigError


def inherit(
    how: Inheritance, network: Network, parent: Network, weights: Mapping[str, Tensor], *, seed: int
) -> dict[str, Tensor]:
    """Compute the first weights of a network that grew from another, on the device of the parent's weights.

    Args:
        how: the map from the parent's weights.
        network: the new network.
        parent: the network that it grew from.
        weights: weights of the parent.
        seed: seed of the run, for drawn weights.

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
    """Put the tensors of a smaller network at the front of every axis of a larger one's.

    Args:
        network: the larger network.
        parent: the smaller network.
        weights: some or all tensors of the smaller network.
        around: tensors of the larger network, which provide all other elements.

    Returns:
        The tensors of the larger network with the names of `around`.

    Raises:
        ConfigError: the smaller network is not a submodel of the larger.
    """
    embedded = dict(around)
    for name, tensor_map in tensor_maps(network, size_in(network, parent)).items():
        if name in weights and name in around:
            embedded[name] = overwrite(tensor_map, weights[name], around[name])
    return embedded


def _divide_copies(replication: Replication, grown: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the division among copies from the weights that read them to the weights that produce them.

    FedTrans, section 4.1, divides there.
    """
    divided = dict(grown)
    for name, replicate in replication.maps().items():
        if replication.network.tensors[name].role not in ("weight", "residual"):
            continue
        tensor = grown[name].reshape(replicate.unfolded).double()
        for dim, (share, reads) in enumerate(zip(replicate.shares, replicate.reads, strict=True)):
            if share is not None:
                along = share.to(tensor.device).reshape([-1 if other == dim else 1 for other in range(tensor.dim())])
                tensor = tensor / along if reads else tensor * along
        divided[name] = tensor.reshape(grown[name].shape).to(grown[name].dtype)
    return divided


def _add_noise(network: Network, how: Replicated, grown: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add noise to the weights that produce copied units, except for the first copy of each index."""
    copies = {
        axis: [index for index, copied in enumerate(source) if copied in source[:index]] for axis, source in how.sources
    }
    noisy = dict(grown)
    for name, decl in network.tensors.items():
        rows = copies.get(str(decl.axes[0])) if decl.role == "weight" else None
        if rows:
            digest = hashlib.sha256(f"{seed}/{network.id}/{name}/noise".encode()).digest()
            generator = Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            drawn = randn(len(rows), *decl.shape[1:], generator=generator).to(grown[name])
            noisy[name] = grown[name].clone()
            noisy[name][tensor(rows)] += how.noise * grown[name].std() * drawn
    return noisy


def _copy(network: Network, parent: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if network.config != parent.config:
        raise ConfigError(
            f"network {network.id!r} has other settings than its parent {parent.id!r}, so its weights cannot be "
            "copied; choose another map"
        )
    return {name: tensor.clone() for name, tensor in weights.items()}


def _choose(network: Network, parent: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    declared = {name: decl.shape for name, decl in parent.tensors.items()}
    odd = [name for name, decl in network.tensors.items() if declared.get(name) != decl.shape]
    if odd:
        raise ConfigError(
            f"network {network.id!r} needs tensor {odd[0]!r} of {parent.id!r}, which has no tensor of that name and "
            "shape"
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
        return embed(self.maps[name], local, self.child.tensors[name].shape)
