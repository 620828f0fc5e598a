"""Clustered learning by architecture: clients of one architecture average their models among themselves.

The baseline "Clustered-FL" of FedADP (section IV), which attributes it to Sattler et al. 2021. It clusters clients by
their architectures, whereas Sattler's method clusters them by what they learn.

Client half: train the given network with the given objective.
Server half: each client keeps the architecture that it was assigned first, or has declared; each architecture has its
own copy of every tensor, a mean by samples over its clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import COUNTED_EQUALLY, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import UNDECLARED, FixedSize, hash_architecture, with_fixed_sizes
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Parameters of clustered learning by architecture.

    Attributes:
        weighting: "samples", or "uniform" to count each client as 1.
        choice: "largest" or "declared", see `subfleet.methods.sizes`.
    """

    TYPE: ClassVar[str] = "clustered"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Clustered learning by architecture",
        paper="the baseline Clustered-FL of FedADP: Unified Model Aggregation for Federated Learning with "
        "Heterogeneous Model Architectures, 2025",
        varies=("width", "depth"),
        departures={
            "a cluster has one architecture, the paper's have similar structures, which it does not define": always
        },
    )
    weighting: Weighting = parameter("samples", otherwise=COUNTED_EQUALLY)
    choice: FixedSize = parameter("largest", paper="declared", otherwise=UNDECLARED)

    def roles(self) -> Roles:
        """A model for each architecture."""
        aggregator = Aggregator(weigh=weigh_by(self.weighting), sharing_groups=_group_by_size, model="architecture")
        return with_fixed_sizes(Roles(aggregator=aggregator), self.choice)


def _group_by_size(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    return dict.fromkeys(network.shapes(client.size), hash_architecture(network, client.size))
