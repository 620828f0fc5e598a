"""FedRolex: a window of every axis that moves on by one place each round, so that all of the model is trained.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022,
section 3.2 and equation 3.

Client half: train the given submodel with the given objective.
Server half: all clients and axes of a round share the window's origin, so that tied channels stay tied; a mean over
the clients that hold an element.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Draw
from subfleet.methods.describing import MethodInfo, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import list_widths, place_axes
from subfleet.protocol.submodel import Architecture, Prefix, Roll


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRolex:
    """Parameters of FedRolex.

    Attributes:
        weighting: "uniform" counts each client as 1, as the paper's code does; "samples" by its samples.
    """

    TYPE: ClassVar[str] = "fedrolex"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedRolex",
        paper="Alam et al., FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, "
        "NeurIPS 2022",
        varies=("width",),
        departures={"channels of a norm group roll together": lambda method, setting: setting.norm == "group"},
    )
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)

    def roles(self) -> Roles:
        """Rolling windows."""
        return Roles(
            assigner=Assigner(space=list_widths, place=_roll),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="whole"),
        )


def _roll(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """Move the windows to their place in the round; channels that are normalised together roll as one group.

    Over as many rounds as an axis has groups, every group is held equally often.
    """

    def choose(axis: Axis, prefix: Prefix) -> Roll:
        groups = axis.size // axis.granularity
        return Roll(start=(draw.round - 1) % groups * axis.granularity, size=prefix.size)

    return place_axes(network, size, choose)
