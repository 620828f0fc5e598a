"""From stored updates to the next model: each network by its own clients', then what becomes of the networks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from subfleet.aggregation.network_aggregation import NetworkAggregation, RefusedError
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ClientUpdate, Participant
from subfleet.methods.roles import RoundUpdates
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import list_carriers, list_lineages
from subfleet.rounds.state import ClientState
from subfleet.transport.blob_store import BlobStore

__all__ = ["AggregatedModel", "Aggregation", "evolved"]

_NO_OTHER: Mapping[str, ModelState] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedModel:
    """The next model.

    Attributes:
        aggregated: the same before networks appeared or retired: what the round is evaluated by.
        clients: whose updates are in it, each with the submodel that it trained.
        refused: clients whose update was refused, with the reason.
        observation: what the method observed in the updates, or in the networks: see `Memory.observe`.
        lineages: of the networks that the run has had by now.
    """

    state: ModelState
    aggregated: ModelState
    clients: tuple[Participant, ...]
    refused: Mapping[str, str]
    observation: Any = None
    lineages: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How the updates of a round become the next model.

    Attributes:
        context: of the run.
        blobs: where the updates are stored.
    """

    context: RunContext
    blobs: BlobStore

    def aggregate(
        self,
        state: ModelState,
        round_number: int,
        clients: Sequence[ClientState],
        memory: Any = None,
        lineages: tuple[Lineage, ...] = (),
        brought: tuple[AnyFamily, ...] = (),
    ) -> AggregatedModel:
        """Aggregate the updates of a round's client states into a model; without any, the model stays as it is.

        Args:
            state: the model that the round started from.
            round_number: of the round.
            clients: with accepted updates.
            memory: what the method remembers.
            lineages: of the networks that the run has had; empty where there was none but the first.
            brought: networks that clients bring and that are in no union yet.
        """
        refused = dict[str, str]()
        while True:
            kept = [
                client for client in sorted(clients, key=lambda one: one.client_id) if client.client_id not in refused
            ]
            aggregate = _Fold(
                aggregation=self,
                before=state,
                round=round_number,
                clients=kept,
                memory=memory,
                lineages=lineages,
                brought=brought,
            )
            try:
                return aggregate.outcome(refused)
            except RefusedError as error:
                # Once more without it, so that nothing of it is left in any network or sharing group.
                refused[error.client_id] = str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """An aggregation of these updates, from the networks to the method's last word."""

    aggregation: Aggregation
    before: ModelState
    round: int
    clients: Sequence[ClientState]
    memory: Any
    lineages: tuple[Lineage, ...]
    brought: tuple[AnyFamily, ...]

    def outcome(self, refused: Mapping[str, str]) -> AggregatedModel:
        state = after = self._aggregated()
        clients = tuple(client.participant for client in self.clients if client.participant is not None)
        observation, evolve = self._observed(), self.aggregation.context.roles.networks.evolve
        lineages = self.lineages
        if evolve is not None and clients:
            context = self._evolving(after, clients, observation)
            answer = evolve(context)
            state, lineages = evolved(self.aggregation.context, context, answer)
            after = answer.after
            observation = observation if answer.observation is None else answer.observation
        return AggregatedModel(
            state=state,
            aggregated=after,
            clients=clients,
            refused=refused,
            observation=observation,
            lineages=lineages,
        )

    def _aggregated(self) -> ModelState:
        """Each network by the updates of its own clients."""
        after = self.before
        by_network: dict[str, list[ClientState]] = {network_id: [] for network_id in self.before.network_ids}
        for client in self.clients:
            self.before.of(_network_of(client))  # which tells of one that has retired
            by_network[_network_of(client)].append(client)
        for network_id, clients in by_network.items():
            after = after.with_network(network_id, self._network(network_id, clients))
        return after

    def _network(self, network_id: str, clients: Sequence[ClientState]) -> ModelState:
        alone = replace(self.before.of(network_id), others=_NO_OTHER)
        return self._part(network_id).aggregate(alone, self.round, clients, self.memory)

    def _aggregated_with(self, network_id: str, names: Collection[str]) -> ModelState:
        clients = [client for client in self.clients if _network_of(client) == network_id and client.client_id in names]
        return self._network(network_id, clients)

    def _evolving(self, after: ModelState, clients: tuple[Participant, ...], observation: Any) -> EvolutionContext:
        return EvolutionContext(
            round=self.round,
            seed=self.aggregation.context.config.seed,
            lineages=list_lineages(self.aggregation.context, self.lineages),
            networks=self._networks(),
            before=self.before,
            after=after,
            clients=clients,
            losses={client.client_id: client.update.loss for client in self.clients if client.update is not None},
            carried_by=partial(list_carriers, self.aggregation.context, self.clients),
            trained=self._trained,
            aggregated_with=self._aggregated_with,
            brought=self.brought,
            observation=observation,
            memory=self.memory,
        )

    def _observed(self) -> Any:
        """What the method observes in the updates."""
        observe = self.aggregation.context.roles.memory.observe
        if observe is None or not self.clients:
            return None
        networks = self._networks()
        return observe(RoundUpdates(networks=networks, round=self.round, clients=self._trained(), memory=self.memory))

    def _trained(self) -> tuple[ClientUpdate, ...]:
        found = list[ClientUpdate]()
        for network_id in self.before.network_ids:
            clients = [client for client in self.clients if _network_of(client) == network_id]
            found += self._part(network_id).trained(self.before.of(network_id), clients)
        return tuple(sorted(found, key=lambda one: one.client.client_id))

    def _networks(self) -> Mapping[str, Network]:
        return MappingProxyType({name: self._part(name).network for name in self.before.network_ids})

    def _part(self, network_id: str) -> NetworkAggregation:
        lineage = self.before.of(network_id).lineage
        return NetworkAggregation.of(self.aggregation.context, lineage, self.aggregation.blobs)


def _network_of(client: ClientState) -> str:
    return "" if client.architecture is None else client.architecture.network


def evolved(
    context: RunContext, evolution: EvolutionContext, answer: Evolution
) -> tuple[ModelState, tuple[Lineage, ...]]:
    """The next model, and the lineages of all networks that the run has had.

    Args:
        context: of the run.
        evolution: what the method was asked.
        answer: what it answered.

    Raises:
        ValueError: the answer is none that `Evolved` allows: a mistake of the method's, which says what it is.
        ConfigError: the map of a network that appears does not fit it.
    """
    _check(context, evolution, answer)
    if not answer.born and not answer.retired:
        return answer.after, () if len(evolution.lineages) == 1 else evolution.lineages
    state, retired = answer.after, frozenset(answer.retired)
    for lineage in answer.born:
        state = state.with_network(lineage.id, _first_state(context, evolution, answer, lineage))
    lineages = (
        *(replace(one, retired_round=evolution.round) if one.id in retired else one for one in evolution.lineages),
        *answer.born,
    )
    for lineage in lineages:
        if lineage.id in retired:
            state = state.without_network(lineage.id, lineage)
    return state, lineages


def _first_state(context: RunContext, evolution: EvolutionContext, answer: Evolution, lineage: Lineage) -> ModelState:
    network, state = context.declared(lineage).network, answer.states.get(lineage.id)
    if state is None:
        # What is drawn lies where the others do.
        parent = evolution.networks[next(iter(evolution.networks)) if lineage.parent is None else lineage.parent]
        shared = answer.after.of(parent.id).shared
        state = ModelState.first(inherit(lineage.map, network, parent, shared, seed=evolution.seed), lineage)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.shared.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ValueError(f"the first weights of network {lineage.id!r} are not those of its settings")
    shared = {name: state.shared[name] for name in network.tensors}
    return replace(state, shared=shared, lineage=lineage, others=MappingProxyType({}))


def _check(context: RunContext, evolution: EvolutionContext, answer: Evolution) -> None:
    used = {one.id for one in evolution.lineages}
    in_use = set(evolution.networks)
    born = [one.id for one in answer.born]
    if len({*born, *used}) < len(born) + len(used) or "" in born:
        raise ValueError(f"networks {born} appear, but each needs an id that none of {sorted(used)} ever had")
    for one in answer.born:
        first = context.config.model
        asked = (one.config.input_shape, one.config.class_count)
        if asked != (first.input_shape, first.class_count):
            raise ValueError(
                f"network {one.id!r} takes {asked[0]} and tells {asked[1]} classes apart, but the run's take "
                f"{first.input_shape} and tell {first.class_count}"
            )
        if one.parent is not None and one.parent not in in_use:
            raise ValueError(f"network {one.id!r} grows from {one.parent!r}, which is not in use")
        if (one.born_round, one.retired_round) != (evolution.round, None):
            raise ValueError(f"network {one.id!r} appears after round {evolution.round}, but says otherwise")
    if not set(answer.retired) <= in_use:
        raise ValueError(f"networks {sorted(answer.retired)} retire, but in use are {sorted(in_use)}")
    if in_use == set(answer.retired) and not born:
        raise ValueError("all networks retire, but one must be in use")
    if set(answer.after.network_ids) != in_use:
        raise ValueError("the model after a round has other networks than the round; name them in `born` or `retired`")
