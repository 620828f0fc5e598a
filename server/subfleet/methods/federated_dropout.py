"""Federated Dropout: every client trains a random submodel, drawn anew each round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018, section 3.2.

Client half: train the given submodel with the given objective.
Server half: for each client and round, a uniform random set of indices of every axis. The sets belong to axes, not to
layers, so that channels that are added to each other stay the same ones. A mean over the clients that hold an element.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator
from subfleet.methods.assigner import Assigner, Draw
from subfleet.methods.describing import MethodInfo, Setting, those_true
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Prefix

__all__ = ["FederatedDropout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedDropout:
    """Federated Dropout keeps as much of every axis as the client's budget carries; it has no parameters."""

    TYPE: ClassVar[str] = "federated_dropout"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Federated Dropout",
        paper="Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, 2018",
        varies=("width",),
        judges=("update_codec",),
    )

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return (
            "the kept fraction depends on each client's budget",
            *those_true(
                {
                    "updates are not compressed (update_codec)": not setting.compressed,
                    "running statistics are those of random submodels, not of the model (norms)": setting.norm
                    == "batch"
                    and setting.techniques.norms != "recalibrated",
                }
            ),
        )

    def roles(self) -> Roles:
        """Random submodels."""
        return Roles(assigner=Assigner(space=whole_depth, place=scatter), aggregator=Aggregator(model="whole"))


def scatter(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """The size at random places of every axis."""
    return replace(size, axes=tuple((name, _random_set(network, name, kept, draw)) for name, kept in size.axes))


def _random_set(network: Network, name: str, kept: IndexSet, draw: Draw) -> IndexSet:
    axis = network.axes[name]
    if not isinstance(kept, Prefix):
        return kept
    step = axis.granularity
    groups = sorted(draw.stream(f"axis {name}").sample(range(axis.size // step), kept.size // step))
    return Explicit(indices=tuple(group * step + place for group in groups for place in range(step)))
