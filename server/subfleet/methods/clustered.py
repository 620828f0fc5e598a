"""Clustered learning by architecture: clients of one architecture average their models among themselves.

The baseline "Clustered-FL" of FedADP (section IV), which attributes it to Sattler et al. 2021. It clusters by what
clients have, where Sattler's clusters by what they learn.

Client half: train the given network with the given objective.
Server half: each client keeps the architecture that it was given first, or has declared; each architecture has a copy
of every tensor of its own, a mean by samples over the clients that have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import BY_SAMPLES, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import DECLARED, FixedSize, architecture_id, with_fixed_sizes
from subfleet.protocol.submodel import Architecture

__all__ = ["Clustered"]


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
        published={"weighting": BY_SAMPLES, "choice": DECLARED},
    )
    weighting: Weighting = "samples"
    choice: FixedSize = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """A model for each architecture."""
        aggregator = Aggregator(weigh=weigh_by(self.weighting), sharing_groups=_group_of_size, model="architecture")
        return with_fixed_sizes(Roles(aggregator=aggregator), self.choice)


def _group_of_size(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    return dict.fromkeys(network.shapes(client.size), architecture_id(network, client.size))
