"""FedAvg on one model for all: the whole one, without the clients that cannot carry it, or the smallest of the space.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.

Client half: train the given model with the given objective; report the change of every tensor.
Server half: the mean of the changes, weighted by samples.

By default nothing departs from the paper: a uniform random sample of the clients, E local epochs, weights n_k / n.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.methods.aggregator import COUNTED_EQUALLY, Aggregator, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """Parameters of FedAvg.

    Attributes:
        model: "largest" trains the whole model, "smallest" the smallest of the space, "nested" each client's largest.
        weighting: "samples" as in the paper, or "uniform".
    """

    TYPE: ClassVar[str] = "fedavg"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedAvg",
        paper="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
    )
    model: Homogeneous = parameter("largest", otherwise=NESTED)
    weighting: Weighting = parameter("samples", otherwise=COUNTED_EQUALLY)

    def roles(self) -> Roles:
        """One size for all clients."""
        return Roles(assigner=assign_homogeneous(self.model), aggregator=Aggregator(weigh=weigh_by(self.weighting)))
