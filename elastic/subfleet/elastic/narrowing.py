"""FedADP's printed way from a larger network to a smaller one, which no widening undoes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from subfleet.elastic.replication import Replicate, Replication
from subfleet.protocol.submodel import Architecture

__all__ = ["Narrowing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """An `Exchange` whose way up is that of a replication, and whose way down adds what is cut to what stays.

    Of every axis that is shorter in the smaller network, the first indices stay. What reads each of them has the sum of
    what reads the others, divided by the number of those that stay, added to it ("FedADP", 2025, section III-B2: the
    weights of what is removed are evenly redistributed, so that the functionality is retained). It is retained where
    all neurons of a layer do the same; else the smaller network computes something else than the larger one, and down
    after up is not the identity.

    Algorithm 3 says the same of a neuron's "value", whatever that is. Were it said of what computes and normalises a
    neuron as well, a network of a quarter of the width would begin with values 64 times as large behind each layer.

    Attributes:
        replication: the way up.
    """

    replication: Replication

    @property
    def key(self) -> str:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return f"narrowed/{self.replication.key}"

    @property
    def moved(self) -> Architecture:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return self.replication.moved

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return {name: _narrow(one, state[name]) for name, one in self.replication.maps().items()}

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return self.replication.up(change)


def _narrow(place: Replicate, tensor: Tensor) -> Tensor:
    found = tensor.reshape(place.unfolded).double()
    for dim, (source, reads) in enumerate(zip(place.sources, place.reads, strict=True)):
        if source is not None:
            count = place.kept[dim]
            cut = found.narrow(dim, count, found.shape[dim] - count).sum(dim, keepdim=True)
            found = found.narrow(dim, 0, count) + (cut / count if reads else 0.0)
    return found.reshape(place.local).to(tensor.dtype)
