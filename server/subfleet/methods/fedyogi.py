"""FedYogi: the mean change of a round as the gradient of Yogi on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2.

Client half: train the given model with the given objective.
Server half: the mean of the changes, weighted by samples, moves the model through Yogi's moments, whose mean of squares
grows fast and decays slowly. Elements that nobody trained keep value and moments.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from subfleet.elastic import server_optimisers
from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model
from subfleet.methods.techniques import Techniques

__all__ = ["FedYogi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi:
    """Parameters of FedYogi.

    Attributes:
        server: of the server's step.
        model: which models are trained.
    """

    TYPE: ClassVar[str] = "fedyogi"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedYogi",
        paper="Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        varies=(),
        published={
            "server.learning_rate": None,
            "server.beta1": Published(value=0.9),
            "server.beta2": Published(value=0.99),
            "server.tau": None,
            "model": ONE_MODEL,
        },
    )
    server: server_optimisers.FedYogi = field(default_factory=server_optimisers.FedYogi)
    model: Homogeneous = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """FedAvg with Yogi on the server."""
        return Roles(assigner=one_model(self.model), techniques=Techniques(server_optimiser=self.server))
