"""Maps between the model and a client's own network, where the client's network is not a slice of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from subfleet.elastic.maps import embed, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replicate, Replication
from subfleet.protocol.submodel import Architecture

__all__ = ["Exchange"]


class Exchange(Protocol):
    """A pair of linear maps between a model and a client's own network.

    A zero change stays zero. If down after up is the identity, a client that trains alone receives its own weights
    back. `subfleet.elastic.replication.Replication` is an implementation.
    """

    @property
    def key(self) -> str:
        """Differs for every pair of maps that gives clients of one size different weights."""
        ...

    @property
    def moved(self) -> Architecture:
        """The submodel of the model that an update moves."""
        ...

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the client's own tensors from the model's."""
        ...

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the change of the model's tensors from a change of all or some of the client's own."""
        ...


def embed_submodel(network: Network, architecture: Architecture, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a submodel embedded in zeros of the whole network's shapes; extracting them restores every bit.

    Args:
        network: the network.
        architecture: the submodel.
        local: all of the submodel's tensors.

    Raises:
        ConfigError: the architecture is not a submodel of this network.
    """
    maps = tensor_maps(network, architecture)
    return {name: embed(own, local[name], network.tensors[name].shape) for name, own in maps.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """An `Exchange` that replicates on the way up and narrows on the way down as FedADP's text says.

    The first indices of each shorter axis stay. The reading weights of the removed indices are summed, divided by the
    number of indices that stay, and added to theirs ("FedADP", 2025, section III-B2: "the weights of what is removed
    are evenly redistributed, so that the functionality is retained"). This holds only if all neurons of a layer compute
    the same. Otherwise the smaller network computes something else, and down after up is not the identity.

    Algorithm 3 says the same of a neuron's undefined "value". Applied also to the weights that compute and normalise a
    neuron, a network of a quarter of the width would start with values 64 times as large after each layer.

    Attributes:
        replication: the maps of the way up.
    """

    replication: Replication

    @property
    def key(self) -> str:
        """See `Exchange`."""
        return f"narrowed/{self.replication.key}"

    @property
    def moved(self) -> Architecture:
        """See `Exchange`."""
        return self.replication.moved

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Exchange`."""
        return {name: _narrow(tensor_map, state[name]) for name, tensor_map in self.replication.maps().items()}

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Exchange`."""
        return self.replication.up(change)


def _narrow(tensor_map: Replicate, tensor: Tensor) -> Tensor:
    narrowed = tensor.reshape(tensor_map.unfolded).double()
    for dim, (source, reads) in enumerate(zip(tensor_map.sources, tensor_map.reads, strict=True)):
        if source is not None:
            count = tensor_map.unfolded_local[dim]
            cut = narrowed.narrow(dim, count, narrowed.shape[dim] - count).sum(dim, keepdim=True)
            narrowed = narrowed.narrow(dim, 0, count) + (cut / count if reads else 0.0)
    return narrowed.reshape(tensor_map.local).to(tensor.dtype)
