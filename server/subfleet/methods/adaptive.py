"""FedAdam and FedYogi: the mean change of a round as the gradient of an adaptive optimiser on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2.

Client half: train the given model with the given objective.
Server half: the mean of the changes, weighted by samples, moves the model through the optimiser's moments. Yogi's mean
of squares grows fast and decays slowly. Elements that nobody trained keep value and moments.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.elastic.server_optimisers import ServerAdam, ServerYogi
from subfleet.methods.describing import MethodInfo, Published, always, parameter, parameters
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous
from subfleet.methods.techniques import Techniques

_MOMENTS = {"beta1": Published(value=0.9), "beta2": Published(value=0.99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam:
    """Parameters of FedAdam.

    Attributes:
        server: of the server's step.
        model: which models are trained.
    """

    TYPE: ClassVar[str] = "fedadam"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedAdam",
        paper="Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        departures={"an update counts by its samples, where algorithm 2 counts all equally": always},
    )
    server: ServerAdam = parameters(ServerAdam, **_MOMENTS)
    model: Homogeneous = parameter("largest", otherwise=NESTED)

    def roles(self) -> Roles:
        """FedAvg with Adam on the server."""
        return Roles(assigner=assign_homogeneous(self.model), techniques=Techniques(server_optimiser=self.server))


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi:
    """Parameters of FedYogi.

    Attributes:
        server: of the server's step.
        model: which models are trained.
    """

    TYPE: ClassVar[str] = "fedyogi"
    INFO: ClassVar[MethodInfo] = replace(FedAdam.INFO, title="FedYogi")
    server: ServerYogi = parameters(ServerYogi, **_MOMENTS)
    model: Homogeneous = parameter("largest", otherwise=NESTED)

    def roles(self) -> Roles:
        """FedAvg with Yogi on the server."""
        return Roles(assigner=assign_homogeneous(self.model), techniques=Techniques(server_optimiser=self.server))
