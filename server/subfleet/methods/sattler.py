"""Clustered federated learning: clients that pull the model apart get models of their own.

Sattler, Müller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE TNNLS 2021. Numbers that its text leaves open are those of its authors' code.

Client half: train the given network with the given objective.
Server half: each cluster has a network of its own. Where the mean change of a cluster's clients has become small and
that of one of them has not, they agree on nothing more: the cluster is split in two by the cosines between changes, and
each half goes on from the cluster's model with the mean change of its own. The split cluster's network retires.

One client alone brings no split about: a half has `least_half` clients, and as many must still move far. Whoever would
be a smaller half by itself is set aside, and the others are looked at without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.elastic.lineage import Copied, Lineage
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import UNIFORM, Aggregator, ClientUpdate, Weighting, weigh_by
from subfleet.methods.assigner import Assignment, AssignmentContext, largest_fitting
from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.grouping import Linkage, cosines, two_groups
from subfleet.methods.roles import ClosedRound, Memory, Roles, RoundUpdates
from subfleet.methods.run_networks import Evolution, EvolutionContext, Networks, StandingContext
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Positive, PositiveAmount
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.model_state import ModelState

__all__ = ["Clustering", "Sattler", "SattlerMemory", "Split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SattlerMemory:
    """What is remembered of the clusters.

    Attributes:
        clusters: the network of each client that has taken part.
        first_norms: of each network, how far its clients moved it in the first round that it was trained in: the norm
            that `least_half` of their changes reach.
        split_count: how many clusters were split so far.
        sizes: of each network, how many clients trained it when it was last trained. Ids are no measure: a device may
            come back under others.
    """

    clusters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    first_norms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    split_count: int = 0
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A cluster that is split.

    Attributes:
        parent: its network.
        halves: pairs of a new network and the clients that it is for, the larger half first. Who was set aside is in
            neither: it goes with the larger half, without its update.
    """

    parent: str
    halves: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """What a round's updates say of the clusters.

    Attributes:
        splits: clusters that are split now.
        first_norms: as in `SattlerMemory`, with those of networks that were trained for the first time.
    """

    splits: tuple[Split, ...] = ()
    first_norms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Sattler:
    """Parameters of clustered federated learning. Their defaults are those of the authors' code.

    Attributes:
        mean_norm: a cluster is split only where the norm of the mean change of its clients is below this, above 0.
        max_norm: and those of `least_half` of its clients' changes above this, above 0.
        norms: "absolute" takes both as they are, which a network of another size needs others of; "relative" as shares
            of the norm that `least_half` changes reached in the cluster's first round, which goes with any network.
        warmup_rounds: no cluster is split up to and with this round, 0 or more.
        least_clients: of a cluster that is split, that took part in the round, 2 or more.
        least_half: clients of each half of a split, 1 or more. With the paper's 1, one client that sends what it likes
            splits clusters that agree.
        linkage: how clusters are grown together until two are left: "complete" as in the code; "single" leaves the
            largest cosine between the two as small as can be, which is what the paper asks for (section III-A).
        weighting: "uniform" as in the code, or "samples".
        model: which models are trained. With "nested" changes are compared where both clients have them.
    """

    TYPE: ClassVar[str] = "sattler"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Clustered federated learning",
        paper="Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under "
        "Privacy Constraints, IEEE TNNLS 2021",
        varies=(),
        published={
            "mean_norm": None,
            "max_norm": None,
            "norms": Published(value="absolute", told="thresholds are relative to the first changes"),
            "warmup_rounds": None,
            "least_clients": None,
            "least_half": Published(value=1, told="a single client is never split off and never causes a split"),
            "linkage": Published(value="single", told="clusters use complete linkage, as in the authors' code"),
            "weighting": UNIFORM,
            "model": ONE_MODEL,
        },
    )
    mean_norm: PositiveAmount = 0.4
    max_norm: PositiveAmount = 1.6
    norms: Literal["absolute", "relative"] = "absolute"
    warmup_rounds: Count = 20
    least_clients: Annotated[int, Range(least=2)] = 3
    least_half: Positive = 2
    linkage: Linkage = "complete"
    weighting: Weighting = "uniform"
    model: Homogeneous = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ("a later client joins the largest cluster without being compared with earlier models",)

    def roles(self) -> Roles:
        """A network for each cluster."""
        return Roles(
            networks=Networks(evolve=_evolve, standing=_standing),
            memory=Memory(initial=SattlerMemory(), observe=self._observe, remember=_remember),
            assigner=replace(one_model(self.model), assign=_assign),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="cluster"),
        )

    def _observe(self, updates: RoundUpdates) -> Clustering:
        memory: SattlerMemory = updates.memory
        splits, norms = list[Split](), dict(memory.first_norms)
        for network_id, network in sorted(updates.networks.items()):
            clients = [one for one in updates.clients if one.client.size.network == network_id]
            if not clients:
                continue
            scale = norms.setdefault(network_id, self._reached(clients)) if self.norms == "relative" else 1.0
            halves = self._halves(network, clients, scale) if updates.round > self.warmup_rounds else ()
            if halves:
                splits.append(_split(network_id, halves, memory.split_count + len(splits)))
        return Clustering(splits=tuple(splits), first_norms=MappingProxyType(norms))

    def _halves(self, network: Network, clients: Sequence[ClientUpdate], scale: float) -> tuple[tuple[str, ...], ...]:
        """The names of the clients of both halves, the larger first; empty where the cluster stays as it is."""
        kept, similarity = list(clients), None
        while len(kept) >= max(self.least_clients, 2 * self.least_half) and self._apart(network, kept, scale):
            similarity = cosines(network, kept) if similarity is None else similarity
            smaller, larger = sorted(two_groups(similarity, self.linkage), key=len)
            if len(smaller) >= self.least_half:
                halves = [tuple(kept[place].client.client_id for place in group) for group in (smaller, larger)]
                return tuple(sorted(halves, key=lambda names: (-len(names), names)))
            kept, similarity = [kept[place] for place in larger], similarity[larger, :][:, larger]
        return ()

    def _apart(self, network: Network, clients: Sequence[ClientUpdate], scale: float) -> bool:
        """Whether they agree on nothing more: their mean hardly moves, and enough of them do."""
        mean = _norm(_mean_change(network, clients).values())
        return mean < self.mean_norm * scale and self._reached(clients) > self.max_norm * scale

    def _reached(self, clients: Sequence[ClientUpdate]) -> float:
        """The norm that `least_half` of the clients' changes reach; of fewer clients the smallest."""
        norms = sorted((_norm(one.change.values()) for one in clients), reverse=True)
        return norms[min(self.least_half, len(norms)) - 1]


def _split(parent: str, halves: Sequence[tuple[str, ...]], count: int) -> Split:
    larger, smaller = halves
    return Split(parent=parent, halves=((f"c{2 * count + 1}", larger), (f"c{2 * count + 2}", smaller)))


def _evolve(context: EvolutionContext) -> Evolution:
    """Each half goes on from the split cluster's model with the mean change of its own clients."""
    found: Clustering = context.observation
    configs = {one.id: one.config for one in context.lineages}
    born, states = list[Lineage](), dict[str, "ModelState"]()
    for split in found.splits:
        for network_id, names in split.halves:
            states[network_id] = replace(context.aggregated_with(split.parent, names), moments={}, kept={})
            born.append(
                Lineage(
                    id=network_id,
                    config=configs[split.parent],
                    parent=split.parent,
                    map=Copied(),
                    born_round=context.round,
                )
            )
    return Evolution(
        after=context.after,
        born=tuple(born),
        states=states,
        retired=tuple(split.parent for split in found.splits),
    )


def _remember(memory: SattlerMemory, closed: ClosedRound) -> SattlerMemory:
    found: Clustering = closed.observation or Clustering(
        first_norms=memory.first_norms
    )  # in rounds that measure norms nobody looks
    own_networks = {name: past.size.network for name, past in closed.clients.items()}
    clusters, sizes = {**memory.clusters, **own_networks}, {**memory.sizes, **Counter(own_networks.values())}
    for split in found.splits:
        (larger, _), _ = split.halves
        own = {name: network_id for network_id, names in split.halves for name in names}
        # Who was not there, or was set aside, goes with most of the others.
        clusters = {name: own.get(name, larger) if one == split.parent else one for name, one in clusters.items()}
        sizes |= {network_id: len(names) for network_id, names in split.halves}
    in_use = set(clusters.values())
    return SattlerMemory(
        clusters=clusters,
        first_norms={network_id: norm for network_id, norm in found.first_norms.items() if network_id in in_use},
        split_count=memory.split_count + len(found.splits),
        sizes={network_id: size for network_id, size in sizes.items() if network_id in in_use},
    )


def _assign(context: AssignmentContext) -> Assignment:
    memory: SattlerMemory = context.draw.memory
    cluster = memory.clusters.get(context.draw.client_id) or _largest_cluster(memory, context.networks)
    return largest_fitting(context.of_network(cluster))


def _largest_cluster(memory: SattlerMemory, networks: Iterable[str]) -> str:
    return min(networks, key=lambda network_id: (-memory.sizes.get(network_id, 0), network_id))


def _standing(context: StandingContext) -> Architecture:
    """What it trained last, of the network that its cluster has now: all have the same settings."""
    memory: SattlerMemory = context.memory
    return replace(context.client.architecture, network=memory.clusters[context.client.client_id])


def _mean_change(network: Network, clients: Sequence[ClientUpdate]) -> dict[str, Tensor]:
    """The mean of changes in the network's own shapes, each counted by its weight, of each element over its holders."""
    import torch

    from subfleet.elastic.maps import tensor_maps

    shapes = {name: decl.shape for name, decl in network.tensors.items()}
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    weights = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for one in clients:
        for name, place in tensor_maps(network, one.client.architecture).items():
            change = one.change[name].double().cpu()
            place.scatter(one.weight * change, sums[name])
            place.scatter(torch.full_like(change, one.weight), weights[name])
    return {name: torch.where(weights[name] > 0, sums[name] / weights[name], 0.0) for name in sums}


def _norm(changes: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(change.double().square().sum()) for change in changes))
