"""What a client receives of a model, and how its change comes back: a pair of maps, where slicing is not meant."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, zeros

from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture

__all__ = ["Exchange", "embed_submodel"]


class Exchange(Protocol):
    """A pair of maps between a model and a client's own network, both linear.

    A change of nothing comes back as a change of nothing, whatever the maps are; where down after up is the identity, a
    client that trains alone gets back what it had. `subfleet.elastic.replication.Replication` is one.
    """

    @property
    def key(self) -> str:
        """Another one for every pair that gives clients of one size other weights."""
        ...

    @property
    def moved(self) -> Architecture:
        """The submodel of the model that an update moves."""
        ...

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's own tensors out of the model's."""
        ...

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The change of the model's tensors that a change of all, or of some, of the client's own comes to."""
        ...


def embed_submodel(network: Network, architecture: Architecture, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A submodel's tensors at their place in tensors of the whole network's shapes, with 0 everywhere else.

    What is cut from these is the submodel again, to the last bit.

    Args:
        network: the declaration.
        architecture: where they are put.
        local: all of the submodel's tensors.

    Raises:
        ConfigError: the architecture is no submodel of this network.
    """
    found = {}
    for name, place in tensor_maps(network, architecture).items():
        found[name] = zeros(network.tensors[name].shape, dtype=local[name].dtype, device=local[name].device)
        place.scatter(local[name], found[name])
    return found
