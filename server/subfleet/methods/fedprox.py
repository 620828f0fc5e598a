"""FedProx: a local loss that keeps the weights near those that the round began with.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 3.2 and algorithm 2.

Client half: train the given submodel on its loss plus mu / 2 times the squared distance from the weights received.
Server half: the mean of the changes, weighted by samples.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.local_training import LocalTraining
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount
from subfleet.protocol.training import TrainingSettings

__all__ = ["FedProx"]


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
        varies=(),
        published={"mu": None, "model": ONE_MODEL},
    )
    mu: Amount = 0.01
    model: Homogeneous = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """FedAvg with a proximal term."""
        return Roles(assigner=one_model(self.model), training=LocalTraining(for_round=self._for_round))

    def _for_round(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        return replace(settings, objective=replace(settings.objective, proximal=True), proximal_mu=self.mu)
