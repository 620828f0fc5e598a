"""FlexiFed: clients of fixed architectures share the layers that their networks have in common from the input on.

Wang et al., "FlexiFed: Personalized Federated Learning for Edge Clients with Heterogeneous Model Architectures",
WWW 2023, section 3: Basic-Common, Clustered-Common and Max-Common.

Client half: train the given network with the given objective.
Server half: each client keeps the architecture that it was assigned first, or has declared. A layer is averaged by
    basic      all clients, among the layers that all architectures begin with; the others are personalised
    clustered  all clients, among the same layers; the others by clients of the same architecture
    max        all clients with the same network from the input up to this layer
The classifier is personalised. Layers are the same if their names and shapes are.

The layers that all architectures begin with count all clients with an update in the model. A client that
joins later with another architecture may reduce them: from then on each client continues on its own with the layers
that are no longer shared, from their last shared state.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import UNDECLARED, FixedSize, hash_architecture, with_fixed_sizes
from subfleet.protocol.submodel import Architecture

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
        departures={"implemented from the paper, which has no public code": always},
    )
    sharing: Literal["basic", "clustered", "max"] = "max"  # the paper has all of them
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)
    choice: FixedSize = parameter("largest", paper="declared", otherwise=UNDECLARED)

    def roles(self) -> Roles:
        """Common layers."""
        aggregator = Aggregator(
            weigh=weigh_by(self.weighting),
            sharing_groups=self._share_layers,
            groups_by_sizes=self.sharing != "max",
            model="client",
        )
        return with_fixed_sizes(Roles(aggregator=aggregator), self.choice)

    def _share_layers(self, network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
        layers = _list_layers(network, client.size)
        if self.sharing == "max":
            keys = _hash_prefixes(layers)
        else:
            common = _count_common(network, layers, sizes)
            clustered = self.sharing == "clustered"
            apart = hash_architecture(network, client.size) if clustered else client.client_id
            keys = [""] * common + [apart] * (len(layers) - common)
        classes = {name for name, axis in network.axes.items() if axis.kind == "class"}
        own = {name for name, decl in network.tensors.items() if classes.intersection(decl.axes)}
        return {
            name: client.client_id if name in own else key
            for layer, key in zip(layers, keys, strict=True)
            for name, _ in layer
            if key or name in own
        }


def _list_layers(network: Network, size: Architecture) -> list[Layer]:
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in network.shapes(size).items():
        layers.setdefault(name.rpartition(".")[0], []).append((name, shape))
    return [tuple(layer) for layer in layers.values()]


def _count_common(network: Network, layers: Sequence[Layer], sizes: Sequence[Architecture]) -> int:
    """The number of layers from the input on that a client's architecture shares with all others."""
    common = len(layers)
    for size in sizes:
        pairs = zip(layers[:common], _list_layers(network, size), strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return common


def _hash_prefixes(layers: Sequence[Layer]) -> list[str]:
    """A key for each layer, equal for clients with the same network up to it."""
    keys, prefix = [], hashlib.sha256()
    for layer in layers:
        prefix.update(repr(layer).encode())
        keys.append(prefix.hexdigest()[:16])
    return keys
