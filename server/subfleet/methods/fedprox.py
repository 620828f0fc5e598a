"""FedProx: a local loss that keeps the weights near the weights at the start of the round.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 3.2 and algorithm 2.

Client half: train the given submodel on its loss plus mu / 2 times the squared distance from the received weights.
Server half: the mean of the changes, weighted by samples.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Roles, train_near_received
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedProx:
    """Parameters of FedProx.

    Attributes:
        mu: coefficient of the proximal term, 0 or more; 0 is FedAvg.
        model: which models are trained; with "nested" the term holds a submodel near the slice that it received.
    """

    TYPE: ClassVar[str] = "fedprox"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedProx",
        paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        departures={
            "clients are drawn uniformly and weighted by samples, where algorithm 2 draws by samples and weights "
            "equally": always,
            "every client trains all epochs, where slow ones may train fewer in the paper": always,
        },
    )
    mu: Amount = 0.01
    model: Homogeneous = parameter("largest", otherwise=NESTED)

    def roles(self) -> Roles:
        """FedAvg with a proximal term."""
        return Roles(assigner=assign_homogeneous(self.model), training=train_near_received(self.mu))
