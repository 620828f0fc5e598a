"""FlexiFed: clients of fixed architectures share the layers that their networks have in common from the input on.

Wang et al., "FlexiFed: Personalized Federated Learning for Edge Clients with Heterogeneous Model Architectures",
WWW 2023, section 3: Basic-Common, Clustered-Common and Max-Common.

Client half: train the given network with the given objective.
Server half: each client keeps the architecture that it was given first, or has declared. Who averages a layer:
    basic      all, in the layers that all clients' architectures begin with; each its own in the others
    clustered  the same, and clients of one architecture average the other layers among themselves
    max        all whose networks are the same from the input up to this layer
The classifier stays each client's own. Layers are the same where names and shapes are.

What all clients' architectures begin with is that of all whose updates are in the model. A client that comes later with
another one may leave the others less in common: from then on each goes on by itself with the layers that it loses, from
where all of them had them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import UNIFORM, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import DECLARED, FixedSize, architecture_id, with_fixed_sizes
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.submodel import Architecture

__all__ = ["FlexiFed"]

Sharing = Literal["basic", "clustered", "max"]
Layer = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the tensors of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexiFed:
    """Parameters of FlexiFed.

    Attributes:
        sharing: "basic", "clustered" or "max".
        weighting: "uniform" counts each client as 1; "samples" by its samples.
        choice: "largest" or "declared", see `subfleet.methods.sizes`.
    """

    TYPE: ClassVar[str] = "flexifed"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FlexiFed",
        paper="Wang et al., FlexiFed: Personalized Federated Learning for Edge Clients with Heterogeneous Model "
        "Architectures, WWW 2023",
        varies=("width", "depth"),
        published={"sharing": None, "weighting": UNIFORM, "choice": DECLARED},  # all ways of sharing are the paper's
    )
    sharing: Sharing = "max"
    weighting: Weighting = "uniform"
    choice: FixedSize = field(default="largest", metadata=ADDED_LATER)

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ("implemented from the paper, which has no public code",)

    def roles(self) -> Roles:
        """Common layers."""
        aggregator = Aggregator(
            weigh=weigh_by(self.weighting),
            sharing_groups=self._sharing_groups,
            groups_by_sizes=self.sharing != "max",
            model="client",
        )
        return with_fixed_sizes(Roles(aggregator=aggregator), self.choice)

    def _sharing_groups(
        self, network: Network, client: Participant, sizes: Sequence[Architecture]
    ) -> Mapping[str, str]:
        layers = _layers(network, client.size)
        keys = _PREFIX_KEYS[self.sharing](network, client, layers, sizes)
        own = {name for name, decl in network.tensors.items() if _is_classifier(network, decl.axes)}
        return {
            name: client.client_id if name in own else key
            for layer, key in zip(layers, keys, strict=True)
            for name, _ in layer
            if key or name in own
        }


def _layers(network: Network, size: Architecture) -> list[Layer]:
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in network.shapes(size).items():
        layers.setdefault(name.rpartition(".")[0], []).append((name, shape))
    return [tuple(layer) for layer in layers.values()]


def _is_classifier(network: Network, axes: Sequence[object]) -> bool:
    return any(isinstance(axis, str) and network.axes[axis].kind == "class" for axis in axes)


def _common_count(network: Network, layers: Sequence[Layer], sizes: Sequence[Architecture]) -> int:
    """How many layers from the input on are the same in a client's architecture and all others."""
    common = len(layers)
    for size in sizes:
        other = _layers(network, size)
        same = 0
        while same < min(common, len(other)) and layers[same] == other[same]:
            same += 1
        common = same
    return common


def _basic(network: Network, client: Participant, layers: Sequence[Layer], sizes: Sequence[Architecture]) -> list[str]:
    common = _common_count(network, layers, sizes)
    return [""] * common + [client.client_id] * (len(layers) - common)


def _clustered(
    network: Network, client: Participant, layers: Sequence[Layer], sizes: Sequence[Architecture]
) -> list[str]:
    common = _common_count(network, layers, sizes)
    return [""] * common + [architecture_id(network, client.size)] * (len(layers) - common)


def _max(network: Network, client: Participant, layers: Sequence[Layer], sizes: Sequence[Architecture]) -> list[str]:
    """A key for each layer that only clients have whose networks are the same up to it."""
    keys, so_far = [], hashlib.sha256()
    for layer in layers:
        so_far.update(repr(layer).encode())
        keys.append(so_far.hexdigest()[:16])
    return keys


_PREFIX_KEYS = {"basic": _basic, "clustered": _clustered, "max": _max}
