"""FedRolex: a window of every axis that rolls on by one place each round, so that all of the model is trained.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022,
section 3.2 and equation 3.

Client half: train the given submodel with the given objective.
Server half: all clients and axes of a round share the window's origin, so that tied channels stay tied; a mean over
the clients that hold an element.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import UNIFORM, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Draw
from subfleet.methods.describing import MethodInfo, Setting, those_true
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.submodel import Architecture, IndexSet, Prefix, Roll

__all__ = ["FedRolex"]


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
        published={"weighting": UNIFORM},
    )
    weighting: Weighting = "uniform"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return those_true({"channels of a norm group roll together": setting.norm == "group"})

    def roles(self) -> Roles:
        """Rolling windows."""
        return Roles(
            assigner=Assigner(space=whole_depth, place=roll),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="whole"),
        )


def roll(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """The size with its windows where the round has them: groups of channels that are normalised together roll as one.

    Over as many rounds as an axis has groups, every group is held equally often.
    """
    return replace(size, axes=tuple((name, _window(network, name, kept, draw.round)) for name, kept in size.axes))


def _window(network: Network, name: str, kept: IndexSet, round_number: int) -> IndexSet:
    axis = network.axes[name]
    if not isinstance(kept, Prefix):
        return kept
    groups = axis.size // axis.granularity
    return Roll(start=(round_number - 1) % groups * axis.granularity, size=kept.size)
