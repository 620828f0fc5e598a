"""FedAvg on one model for all: the whole one, which leaves out who cannot carry it, or the smallest of the space.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.

Client half: train the given model with the given objective; report the change of every tensor.
Server half: the mean of the changes, weighted by samples.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.methods.aggregator import BY_SAMPLES, Aggregator, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model

__all__ = ["FedAvg"]


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
        varies=(),
        published={"model": ONE_MODEL, "weighting": BY_SAMPLES},
    )
    model: Homogeneous = "largest"
    weighting: Weighting = "samples"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """One size for everybody."""
        return Roles(assigner=one_model(self.model), aggregator=Aggregator(weigh=weigh_by(self.weighting)))
