"""From stored updates to the next model: each network with its own clients' updates, then the method's evolution."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from subfleet.aggregation.network_aggregation import NetworkAggregation, RefusedError
from subfleet.aggregation.update_ranges import UpdateRanges
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import RoundUpdates
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import list_carriers, list_lineages
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import ClientState
from subfleet.transport.blob_store import BlobStore

_NO_OTHER: Mapping[str, ModelState] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedModel:
    """The next model.

    Attributes:
        aggregated: the model before networks appeared or retired, with which the round is evaluated.
        clients: the clients with an update in it, each with the submodel that it trained.
        refused: by client, why its update was refused.
        observation: what the method observed in the updates or the networks, see `Memory.observe`.
        lineages: of the networks that the run has had by now.
    """

    state: ModelState
    aggregated: ModelState
    clients: tuple[Participant, ...]
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    observation: Any = None
    lineages: tuple[Lineage, ...] = ()


def aggregate_model(
    context: RunContext,
    blobs: BlobStore,
    state: ModelState,
    request: AggregationRequest,
    ranges: UpdateRanges | None = None,
) -> AggregatedModel:
    """Aggregate the updates of a round's clients into a model; without any, the model is unchanged.

    Args:
        context: of the run.
        blobs: where the updates are stored.
        state: the model that the round started from.
        request: with clients that have accepted updates.
        ranges: knows how large their changes are; by default they are measured.
    """
    ranges = ranges or UpdateRanges()
    refused = dict[str, str]()
    while True:
        clients = tuple(
            client
            for client in sorted(request.clients, key=lambda client: client.client_id)
            if client.client_id not in refused
        )
        attempt = _Attempt(
            context=context, blobs=blobs, ranges=ranges, before=state, request=replace(request, clients=clients)
        )
        try:
            return replace(attempt.run(), refused=refused)
        except RefusedError as error:
            # Again without this update, so that no network and no sharing group contains any of it.
            refused[error.client_id] = str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """An attempt to aggregate some updates, which fails if one of them cannot be; see `aggregate_model`."""

    context: RunContext
    blobs: BlobStore
    ranges: UpdateRanges
    before: ModelState
    request: AggregationRequest

    def run(self) -> AggregatedModel:
        request, roles = self.request, self.context.roles
        for client in request.clients:
            self.before.of(find_network_id(client))  # raises if the network has retired
        state = self.before
        for network_id in self.before.network_ids:
            state = state.with_network(network_id, self._part(network_id).aggregate())
        aggregated, lineages, observation = state, request.lineages, None
        clients = tuple(client.participant for client in request.clients if client.participant is not None)
        if roles.memory.observe is not None and clients:
            parts = (self._part(network_id).read_updates() for network_id in self.before.network_ids)
            updates = tuple(sorted(itertools.chain(*parts), key=lambda update: update.client.client_id))
            observation = roles.memory.observe(
                RoundUpdates(networks=self._networks, round=request.round, clients=updates, memory=request.memory)
            )
        if roles.networks.evolve is not None and clients:
            context = self._describe(aggregated, clients, observation)
            evolution = roles.networks.evolve(context)
            state, lineages = apply_evolution(self.context, context, evolution)
            aggregated = evolution.after
            observation = observation if evolution.observation is None else evolution.observation
        return AggregatedModel(
            state=state, aggregated=aggregated, clients=clients, observation=observation, lineages=lineages
        )

    def _part(self, network_id: str, names: Collection[str] | None = None) -> NetworkAggregation:
        """The updates of a network; with names, those of these clients alone."""
        return NetworkAggregation(
            context=self.context,
            blobs=self.blobs,
            ranges=self.ranges,
            state=replace(self.before.of(network_id), others=_NO_OTHER),
            round=self.request.round,
            clients=[
                client
                for client in self.request.clients
                if find_network_id(client) == network_id and (names is None or client.client_id in names)
            ],
            memory=self.request.memory,
        )

    def _describe(self, after: ModelState, clients: tuple[Participant, ...], observation: Any) -> EvolutionContext:
        request = self.request
        return EvolutionContext(
            round=request.round,
            seed=self.context.config.seed,
            lineages=list_lineages(self.context, request.lineages),
            networks=self._networks,
            before=self.before,
            after=after,
            clients=clients,
            losses={client.client_id: client.update.loss for client in request.clients if client.update is not None},
            carried_by=partial(list_carriers, self.context, request.clients),
            aggregated_with=lambda network_id, names: self._part(network_id, names).aggregate(),
            brought=request.brought,
            observation=observation,
            memory=request.memory,
        )

    @property
    def _networks(self) -> Mapping[str, Network]:
        return MappingProxyType({name: self._part(name).network for name in self.before.network_ids})


def find_network_id(client: ClientState) -> str:
    """The id of the network of a client's submodel."""
    return "" if client.architecture is None else client.architecture.network


def apply_evolution(
    context: RunContext, evolution: EvolutionContext, answer: Evolution
) -> tuple[ModelState, tuple[Lineage, ...]]:
    """The next model, and the lineages of all networks that the run has had.

    Args:
        context: of the run.
        evolution: the round that the method got.
        answer: the method's answer.

    Raises:
        ValueError: the answer breaks a rule of `Evolution`, by a mistake of the method.
        ConfigError: the map of a new network does not fit it.
    """
    _check(context, evolution, answer)
    if not answer.born and not answer.retired:
        return answer.after, () if len(evolution.lineages) == 1 else evolution.lineages
    state, retired = answer.after, frozenset(answer.retired)
    for lineage in answer.born:
        state = state.with_network(lineage.id, _first_state(context, evolution, answer, lineage))
    lineages = (
        *(
            replace(lineage, retired_round=evolution.round) if lineage.id in retired else lineage
            for lineage in evolution.lineages
        ),
        *answer.born,
    )
    for lineage in lineages:
        if lineage.id in retired:
            state = state.without_network(lineage.id, lineage)
    return state, lineages


def _first_state(context: RunContext, evolution: EvolutionContext, answer: Evolution, lineage: Lineage) -> ModelState:
    network, state = context.get_declared(lineage).network, answer.states.get(lineage.id)
    if state is None:
        # A drawn network lies on the same device as the others.
        parent = evolution.networks[next(iter(evolution.networks)) if lineage.parent is None else lineage.parent]
        shared = answer.after.of(parent.id).shared
        state = ModelState.first(inherit(lineage.map, network, parent, shared, seed=evolution.seed), lineage)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.shared.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ValueError(f"the first weights of network {lineage.id!r} do not fit its settings")
    shared = {name: state.shared[name] for name in network.tensors}
    return replace(state, shared=shared, lineage=lineage, others=MappingProxyType({}))


def _check(context: RunContext, evolution: EvolutionContext, answer: Evolution) -> None:
    used = {lineage.id for lineage in evolution.lineages}
    in_use = set(evolution.networks)
    born = [lineage.id for lineage in answer.born]
    if len({*born, *used}) < len(born) + len(used) or "" in born:
        raise ValueError(f"networks {born} appear, but each needs a new id; already used are {sorted(used)}")
    for lineage in answer.born:
        config, first = lineage.config, context.config.model
        if (config.input_shape, config.class_count) != (first.input_shape, first.class_count):
            raise ValueError(
                f"network {lineage.id!r} has inputs of shape {config.input_shape} and {config.class_count} classes, "
                f"but the run's networks have {first.input_shape} and {first.class_count}"
            )
        if lineage.parent is not None and lineage.parent not in in_use:
            raise ValueError(f"network {lineage.id!r} grows from {lineage.parent!r}, which is not in use")
        if (lineage.born_round, lineage.retired_round) != (evolution.round, None):
            raise ValueError(
                f"network {lineage.id!r} appears after round {evolution.round}, but its born_round is "
                f"{lineage.born_round} and its retired_round {lineage.retired_round}"
            )
    if not set(answer.retired) <= in_use:
        raise ValueError(f"networks {sorted(answer.retired)} retire, but only {sorted(in_use)} are in use")
    if in_use == set(answer.retired) and not born:
        raise ValueError("all networks retire, but at least one must stay in use")
    if set(answer.after.network_ids) != in_use:
        raise ValueError("the model after a round has other networks than the round; name them in `born` or `retired`")
