"""Standalone: every client trains a model of its own and learns nothing from others; the floor of every comparison.

Client half: train the given model with the given objective; report the change of every tensor.
Server half: keep a copy of every tensor for each client, where the copies of other methods are kept, so that they
survive a crash too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator, Participant
from subfleet.methods.describing import MethodInfo, always
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import FixedSize, with_fixed_sizes
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Standalone:
    """Parameters of standalone training.

    Attributes:
        choice: "largest" or "declared", see `subfleet.methods.sizes`.
    """

    TYPE: ClassVar[str] = "standalone"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Standalone",
        paper="the reference row without federation",
        varies=("width", "depth"),
        judges=("norms",),
        departures={"the server stores the copies, so bytes are sent that a device alone would not send": always},
    )
    choice: FixedSize = "largest"

    def roles(self) -> Roles:
        """A copy of everything for each client."""
        return with_fixed_sizes(
            Roles(aggregator=Aggregator(sharing_groups=_share_nothing, model="client")), self.choice
        )


def _share_nothing(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    return dict.fromkeys(network.tensors, client.client_id)
