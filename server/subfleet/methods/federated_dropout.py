"""Federated Dropout: every client trains a random submodel, drawn anew each round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018, section 3.2.

Client half: train the given submodel with the given objective.
Server half: a uniform random set of indices of every axis for each client and round. Sets belong to axes, not to
layers, so that channels that are added to each other correspond. A mean over the clients that hold an element.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator
from subfleet.methods.assigner import Assigner, Draw
from subfleet.methods.describing import MethodInfo, always
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import keep_groups, list_widths, place_axes
from subfleet.protocol.submodel import Architecture, Explicit, Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedDropout:
    """Federated Dropout keeps as much of every axis as fits the client's budget; it has no parameters."""

    TYPE: ClassVar[str] = "federated_dropout"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Federated Dropout",
        paper="Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, 2018",
        varies=("width",),
        judges=("update_codec",),
        departures={
            "the kept fraction depends on each client's budget": always,
            "updates are not compressed (update_codec)": lambda method, setting: not setting.compressed,
            "running statistics are those of random submodels, not of the model (norms)": (
                lambda method, setting: setting.norm == "batch" and setting.techniques.norms != "recalibrated"
            ),
        },
    )

    def roles(self) -> Roles:
        """Random submodels."""
        return Roles(assigner=Assigner(space=list_widths, place=_scatter), aggregator=Aggregator(model="whole"))


def _scatter(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """Place the size at random indices of every axis."""

    def choose(axis: Axis, prefix: Prefix) -> Explicit:
        groups = range(axis.size // axis.granularity)
        return keep_groups(axis, draw.stream(f"axis {axis.name}").sample(groups, prefix.size // axis.granularity))

    return place_axes(network, size, choose)
