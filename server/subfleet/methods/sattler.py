"""Clustered federated learning: clients that disagree about the model get separate models.

Sattler, Müller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE TNNLS 2021. Numbers that its text leaves open are those of its authors' code.

Client half: train the given network with the given objective.
Server half: each cluster has its own network. When the mean change of a cluster's clients has become small, and the
change of one of them has not, they no longer agree: the cluster is split in two by the cosines between changes, and
each half continues from the cluster's model with its own mean change. The split cluster's network retires.

A single client causes no split: a half has `least_half` clients, and as many must still move far. Clients that would be
a smaller half are set aside, and the others are examined without them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from subfleet.elastic.lineage import Copied, Lineage
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import (
    COUNTED_BY_SAMPLES,
    Aggregator,
    ClientUpdate,
    ModelState,
    Tensor,
    Weighting,
    weigh_by,
)
from subfleet.methods.assigner import Assignment, AssignmentContext, assign_largest
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import ClosedRound, Memory, Roles, RoundUpdates
from subfleet.methods.run_networks import Evolution, EvolutionContext, Networks, StandingContext
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Positive, PositiveAmount
from subfleet.protocol.submodel import Architecture

Matrix = NDArray[np.float64]
Linkage = Literal["complete", "single"]
"""The distance of two groups: that of their farthest members, or of their nearest."""
Halves = tuple[tuple[str, tuple[str, ...]], ...]
"""The new network of each half of a split cluster, and its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SattlerMemory:
    """The memory of clustered federated learning.

    Attributes:
        clusters: by client that has taken part, its network.
        first_norms: by network, the norm that `least_half` of its clients' changes reached in its first round.
        split_count: how many clusters have been split.
        sizes: by network, how many clients trained it in its last round. The number of ids would be no measure, as a
            device may return under another id.
    """

    clusters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    first_norms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    split_count: int = 0
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """The clusters after a round.

    Attributes:
        splits: by the network of a cluster that is split now, pairs of a new network and its clients, the larger half
            first. A client that was set aside is in neither; it joins the larger half without its update.
        first_norms: as in `SattlerMemory`, with networks that were trained for the first time.
    """

    splits: Mapping[str, Halves] = field(default_factory=lambda: MappingProxyType({}))
    first_norms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Sattler:
    """Parameters of clustered federated learning; the defaults are those of the authors' code.

    Attributes:
        mean_norm: a cluster is split only if the norm of its clients' mean change is below this, above 0.
        max_norm: and if the norms of at least `least_half` of its clients' changes are above this, above 0.
        norms: "absolute" uses both as they are, so they depend on the network; "relative" uses them as multiples of the
            norm that `least_half` changes reached in the cluster's first round.
        warmup_rounds: no cluster is split up to this round, 0 or more.
        least_clients: a cluster is split only if this many of its clients took part in the round, 2 or more.
        least_half: clients in each half of a split, 1 or more. With the paper's 1, one malicious client can split a
            cluster that agrees.
        linkage: how groups are joined until two are left: "complete" as in the code; "single" minimises the largest
            cosine between the two, as the paper asks (section III-A).
        weighting: "uniform" as in the code, or "samples".
        model: which models are trained. With "nested", changes are compared over elements that both clients have.
    """

    TYPE: ClassVar[str] = "sattler"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Clustered federated learning",
        paper="Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under "
        "Privacy Constraints, IEEE TNNLS 2021",
        departures={"a later client joins the largest cluster without being compared with earlier models": always},
    )
    mean_norm: PositiveAmount = 0.4
    max_norm: PositiveAmount = 1.6
    norms: Literal["absolute", "relative"] = parameter(
        "absolute", otherwise="thresholds are relative to the first changes"
    )
    warmup_rounds: Count = 20
    least_clients: Annotated[int, Range(least=2)] = 3
    least_half: Positive = parameter(
        2, paper=1, otherwise="a single client is never split off and never causes a split"
    )
    linkage: Linkage = parameter(
        "complete", paper="single", otherwise="clusters use complete linkage, as in the authors' code"
    )
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)
    model: Homogeneous = parameter("largest", otherwise=NESTED)

    def roles(self) -> Roles:
        """A network for each cluster."""
        return Roles(
            networks=Networks(evolve=_evolve, standing=_find_standing),
            memory=Memory(initial=SattlerMemory(), observe=self._observe, remember=_remember),
            assigner=replace(assign_homogeneous(self.model), assign=_assign),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), model="cluster"),
        )

    def _observe(self, updates: RoundUpdates) -> Clustering:
        memory: SattlerMemory = updates.memory
        splits, norms = dict[str, Halves](), dict(memory.first_norms)
        for network_id, network in sorted(updates.networks.items()):
            clients = [update for update in updates.clients if update.client.size.network == network_id]
            if not clients:
                continue
            scale = norms.setdefault(network_id, self._reach(clients)) if self.norms == "relative" else 1.0
            halves = self._split(network, clients, scale) if updates.round > self.warmup_rounds else ()
            if halves:
                count = 2 * (memory.split_count + len(splits))
                splits[network_id] = tuple(
                    (f"c{count + number}", names) for number, names in enumerate(halves, start=1)
                )
        return Clustering(splits=MappingProxyType(splits), first_norms=MappingProxyType(norms))

    def _split(self, network: Network, clients: Sequence[ClientUpdate], scale: float) -> tuple[tuple[str, ...], ...]:
        """The client ids of both halves, the larger half first; empty if the cluster is not split."""
        remaining, similarity = list(clients), None
        while len(remaining) >= max(self.least_clients, 2 * self.least_half) and self._disagree(
            network, remaining, scale
        ):
            similarity = compute_cosines(network, remaining) if similarity is None else similarity
            smaller, larger = sorted(split_in_two(similarity, self.linkage), key=len)
            if len(smaller) >= self.least_half:
                halves = [tuple(remaining[index].client.client_id for index in group) for group in (smaller, larger)]
                return tuple(sorted(halves, key=lambda names: (-len(names), names)))
            remaining, similarity = [remaining[index] for index in larger], similarity[larger, :][:, larger]
        return ()

    def _disagree(self, network: Network, clients: Sequence[ClientUpdate], scale: float) -> bool:
        """Whether the clients no longer agree: their mean change is small, and enough of their changes are not."""
        mean = _norm(_average_changes(network, clients))
        return mean < self.mean_norm * scale and self._reach(clients) > self.max_norm * scale

    def _reach(self, clients: Sequence[ClientUpdate]) -> float:
        """The norm that `least_half` of the clients' changes reach; the smallest one of fewer clients."""
        norms = sorted((_norm(update.change.values()) for update in clients), reverse=True)
        return norms[min(self.least_half, len(norms)) - 1]


def _evolve(context: EvolutionContext) -> Evolution:
    """Continue each half from the split cluster's model with the mean change of its own clients."""
    clustering: Clustering = context.observation
    configs = {lineage.id: lineage.config for lineage in context.lineages}
    born, states = list[Lineage](), dict[str, ModelState]()
    for parent, halves in clustering.splits.items():
        for network_id, names in halves:
            states[network_id] = replace(context.aggregated_with(parent, names), moments={}, kept={})
            born.append(
                Lineage(id=network_id, config=configs[parent], parent=parent, map=Copied(), born_round=context.round)
            )
    return Evolution(after=context.after, born=tuple(born), states=states, retired=tuple(clustering.splits))


def _remember(memory: SattlerMemory, closed: ClosedRound) -> SattlerMemory:
    # A round that measures norms has no observation.
    clustering: Clustering = closed.observation or Clustering(first_norms=memory.first_norms)
    own_networks = {name: past.size.network for name, past in closed.clients.items()}
    clusters, sizes = {**memory.clusters, **own_networks}, {**memory.sizes, **Counter(own_networks.values())}
    for parent, halves in clustering.splits.items():
        (larger, _), _ = halves
        own = {name: network_id for network_id, names in halves for name in names}
        # Clients that were absent or set aside join the larger half.
        clusters = {
            name: own.get(name, larger) if network_id == parent else network_id for name, network_id in clusters.items()
        }
        sizes |= {network_id: len(names) for network_id, names in halves}
    in_use = set(clusters.values())
    return SattlerMemory(
        clusters=clusters,
        first_norms={network_id: norm for network_id, norm in clustering.first_norms.items() if network_id in in_use},
        split_count=memory.split_count + len(clustering.splits),
        sizes={network_id: size for network_id, size in sizes.items() if network_id in in_use},
    )


def _assign(context: AssignmentContext) -> Assignment:
    memory: SattlerMemory = context.draw.memory
    largest = min(context.networks, key=lambda network_id: (-memory.sizes.get(network_id, 0), network_id))
    return assign_largest(context.of_network(memory.clusters.get(context.draw.client_id) or largest))


def _find_standing(context: StandingContext) -> Architecture:
    """The submodel that it trained last, in its cluster's present network: all networks have the same settings."""
    memory: SattlerMemory = context.memory
    return replace(context.client.architecture, network=memory.clusters[context.client.client_id])


def _stack_changes(network: Network, clients: Sequence[ClientUpdate]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each tensor, the clients' changes in the network's shape, and 1 for each element that a client holds."""
    import torch

    from subfleet.elastic.maps import tensor_maps

    maps = [tensor_maps(network, update.client.architecture) for update in clients]
    for name, decl in network.tensors.items():
        changes = torch.zeros(len(clients), *decl.shape, dtype=torch.float64)
        held = torch.zeros_like(changes)
        for index, (update, own) in enumerate(zip(clients, maps, strict=True)):
            if name in own and not decl.frozen:
                change = update.change[name].double().cpu()
                own[name].scatter(change, changes[index])
                own[name].scatter(torch.ones_like(change), held[index])
        yield changes, held


def _average_changes(network: Network, clients: Sequence[ClientUpdate]) -> Iterator[Tensor]:
    """The weighted mean of the changes of each tensor, of each element over the clients that hold it."""
    for changes, held in _stack_changes(network, clients):
        total = sum(update.weight * change for update, change in zip(clients, changes, strict=True))
        weight = sum(update.weight * elements for update, elements in zip(clients, held, strict=True))
        yield (total / weight).where(weight > 0, 0.0)


def _norm(changes: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(change.double().square().sum()) for change in changes))


def compute_cosines(network: Network, clients: Sequence[ClientUpdate]) -> Matrix:
    """The cosines between the changes of every two clients, over the elements that both have.

    Args:
        network: of all of them.
        clients: in the order of rows and columns.

    Returns:
        A symmetric matrix of numbers from -1 to 1; 0 if one of the two has not moved.
    """
    import torch

    count = len(clients)
    products, squares = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for changes, held in _stack_changes(network, clients):
        flat, mask = changes.reshape(count, -1), held.reshape(count, -1)
        products += flat @ flat.T
        squares += flat.square() @ mask.T  # of the row's client, where the column's client has the element too
    norms = (squares * squares.T).sqrt()
    cosines = torch.where(norms > 0, products / norms.clamp_min(1e-300), torch.zeros_like(products))
    return np.asarray(cosines.clamp(-1.0, 1.0).numpy())


def split_in_two(similarity: Matrix, linkage: Linkage) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Agglomerative clustering: join the two nearest groups until two are left; among equals, the first ones.

    Args:
        similarity: of every two of two or more members, symmetric.
        linkage: see `Linkage`.

    Returns:
        The members of both groups by index, in order; the group of the first member first.
    """
    count = len(similarity)
    distance = -np.asarray(similarity, np.float64)
    np.fill_diagonal(distance, np.inf)
    merged = np.maximum if linkage == "complete" else np.minimum
    groups = {index: [index] for index in range(count)}
    while len(groups) > 2:
        left, right = divmod(int(distance.argmin()), count)
        row = merged(distance[left], distance[right])
        distance[left], distance[:, left] = row, row
        distance[right], distance[:, right] = np.inf, np.inf
        distance[left, left] = np.inf
        groups[left] += groups.pop(right)
    first, second = sorted(tuple(sorted(group)) for group in groups.values())
    return first, second
