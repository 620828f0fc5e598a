"""FedADP's printed way from a larger network to a smaller one, which no widening undoes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from subfleet.elastic.replication import Replicate, Replication
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Narrowing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """An `Exchange` whose way up is that of a replication, and whose way down adds what is cut to what stays.

    Of every axis that is shorter in the smaller network, the first indices stay, and each has the sum of all others,
    divided by the number of those that stay, added to it ("FedADP", 2025, section III-B2). The text says it of a
    layer's neurons; here it holds for what computes them, for what reads them and for what normalises them alike. The
    smaller network then computes something else than the larger one, and down after up is not the identity.

    Attributes:
        replication: the way up.
    """

    replication: Replication

    @property
    def key(self) -> str:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return f"narrowed/{self.replication.key}"

    @property
    def moved(self) -> SubnetSpec:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return self.replication.moved

    def down(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return {name: _narrowed(one, state[name]) for name, one in self.replication.maps().items()}

    def up(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `subfleet.elastic.exchanges.Exchange`."""
        return self.replication.up(change)


def _narrowed(place: Replicate, tensor: Tensor) -> Tensor:
    found = tensor.reshape(place.unfolded).double()
    for dim, source in enumerate(place.sources):
        if source is not None:
            count = place.kept[dim]
            cut = found.narrow(dim, count, found.shape[dim] - count).sum(dim, keepdim=True)
            found = found.narrow(dim, 0, count) + cut / count
    return found.reshape(place.local).to(tensor.dtype)
