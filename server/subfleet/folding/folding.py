"""From stored updates to the next model: each network by its own clients', then what becomes of the networks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.inheriting import inherited
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.folding.network_folding import NetworkFolding, RefusedError
from subfleet.methods.aggregator import ClientUpdate, Participant
from subfleet.methods.roles import RoundUpdates
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.rounds.networks import all_lineages, carried_by
from subfleet.rounds.state import Seat
from subfleet.rounds.terms import Terms
from subfleet.transport.blob_store import BlobStore

__all__ = ["FoldedModel", "Folding", "evolved"]

_NO_OTHER: Mapping[str, ModelState] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedModel:
    """The next model.

    Attributes:
        folded: the same before networks appeared or retired: what the round is evaluated by.
        clients: whose updates are in it, each with the subnet that it trained.
        refused: clients whose update was refused, with the reason.
        observation: what the method observed in the updates, or in the networks: see `Memory.observe`.
        lineages: of the networks that the run has had by now.
    """

    state: ModelState
    folded: ModelState
    clients: tuple[Participant, ...]
    refused: Mapping[str, str]
    observation: Any = None
    lineages: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How the updates of a round become the next model.

    Attributes:
        terms: of the run.
        blobs: where the updates are stored.
    """

    terms: Terms
    blobs: BlobStore

    def fold(
        self,
        state: ModelState,
        round_number: int,
        seats: Sequence[Seat],
        memory: Any = None,
        lineages: tuple[Lineage, ...] = (),
        brought: tuple[AnyFamily, ...] = (),
    ) -> FoldedModel:
        """Fold the updates of a round's seats into a model; without any, the model stays as it is.

        Args:
            state: the model that the round started from.
            round_number: of the round.
            seats: with accepted updates.
            memory: what the method remembers.
            lineages: of the networks that the run has had; empty where there was none but the first.
            brought: networks that clients bring and that are in no union yet.
        """
        refused = dict[str, str]()
        while True:
            kept = [seat for seat in sorted(seats, key=lambda one: one.client_id) if seat.client_id not in refused]
            fold = _Fold(
                folding=self,
                before=state,
                round=round_number,
                seats=kept,
                memory=memory,
                lineages=lineages,
                brought=brought,
            )
            try:
                return fold.outcome(refused)
            except RefusedError as error:
                # Once more without it, so that nothing of it is left in any network or cohort.
                refused[error.client_id] = str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """A fold of these updates, from the networks to the method's last word."""

    folding: Folding
    before: ModelState
    round: int
    seats: Sequence[Seat]
    memory: Any
    lineages: tuple[Lineage, ...]
    brought: tuple[AnyFamily, ...]

    def outcome(self, refused: Mapping[str, str]) -> FoldedModel:
        state = after = self._folded()
        clients = tuple(seat.participant for seat in self.seats if seat.participant is not None)
        observation, evolve = self._observed(), self.folding.terms.roles.networks.evolve
        lineages = self.lineages
        if evolve is not None and clients:
            context = self._evolving(after, clients, observation)
            answer = evolve(context)
            state, lineages = evolved(self.folding.terms, context, answer)
            after = answer.after
            observation = observation if answer.observation is None else answer.observation
        return FoldedModel(
            state=state,
            folded=after,
            clients=clients,
            refused=refused,
            observation=observation,
            lineages=lineages,
        )

    def _folded(self) -> ModelState:
        """Each network by the updates of its own clients."""
        after = self.before
        by_network: dict[str, list[Seat]] = {network_id: [] for network_id in self.before.network_ids}
        for seat in self.seats:
            self.before.of(_network_of(seat))  # which tells of one that has retired
            by_network[_network_of(seat)].append(seat)
        for network_id, seats in by_network.items():
            after = after.with_network(network_id, self._network(network_id, seats))
        return after

    def _network(self, network_id: str, seats: Sequence[Seat]) -> ModelState:
        alone = replace(self.before.of(network_id), others=_NO_OTHER)
        return self._part(network_id).fold(alone, self.round, seats, self.memory)

    def _folded_with(self, network_id: str, names: Collection[str]) -> ModelState:
        seats = [seat for seat in self.seats if _network_of(seat) == network_id and seat.client_id in names]
        return self._network(network_id, seats)

    def _evolving(self, after: ModelState, clients: tuple[Participant, ...], observation: Any) -> EvolutionContext:
        return EvolutionContext(
            round=self.round,
            seed=self.folding.terms.config.seed,
            lineages=all_lineages(self.folding.terms, self.lineages),
            networks=self._networks(),
            before=self.before,
            after=after,
            clients=clients,
            losses={seat.client_id: seat.update.loss for seat in self.seats if seat.update is not None},
            carried_by=partial(carried_by, self.folding.terms, self.seats),
            trained=self._trained,
            folded_with=self._folded_with,
            brought=self.brought,
            observation=observation,
            memory=self.memory,
        )

    def _observed(self) -> Any:
        """What the method observes in the updates."""
        observe = self.folding.terms.roles.memory.observe
        if observe is None or not self.seats:
            return None
        networks = self._networks()
        return observe(RoundUpdates(networks=networks, round=self.round, clients=self._trained(), memory=self.memory))

    def _trained(self) -> tuple[ClientUpdate, ...]:
        found = list[ClientUpdate]()
        for network_id in self.before.network_ids:
            seats = [seat for seat in self.seats if _network_of(seat) == network_id]
            found += self._part(network_id).trained(self.before.of(network_id), seats)
        return tuple(sorted(found, key=lambda one: one.client.client_id))

    def _networks(self) -> Mapping[str, Network]:
        return MappingProxyType({name: self._part(name).network for name in self.before.network_ids})

    def _part(self, network_id: str) -> NetworkFolding:
        lineage = self.before.of(network_id).lineage
        return NetworkFolding.of(self.folding.terms, lineage, self.folding.blobs)


def _network_of(seat: Seat) -> str:
    return "" if seat.spec is None else seat.spec.network


def evolved(terms: Terms, context: EvolutionContext, answer: Evolution) -> tuple[ModelState, tuple[Lineage, ...]]:
    """The next model, and the lineages of all networks that the run has had.

    Args:
        terms: of the run.
        context: what the method was asked.
        answer: what it answered.

    Raises:
        ValueError: the answer is none that `Evolved` allows: a mistake of the method's, which says what it is.
        ConfigError: the map of a network that appears does not fit it.
    """
    _check(terms, context, answer)
    if not answer.born and not answer.retired:
        return answer.after, () if len(context.lineages) == 1 else context.lineages
    state, retired = answer.after, frozenset(answer.retired)
    for lineage in answer.born:
        state = state.with_network(lineage.id, _first_state(terms, context, answer, lineage))
    lineages = (
        *(replace(one, retired_round=context.round) if one.id in retired else one for one in context.lineages),
        *answer.born,
    )
    for lineage in lineages:
        if lineage.id in retired:
            state = state.without_network(lineage.id, lineage)
    return state, lineages


def _first_state(terms: Terms, context: EvolutionContext, answer: Evolution, lineage: Lineage) -> ModelState:
    network, state = terms.declared(lineage).network, answer.states.get(lineage.id)
    if state is None:
        # What is drawn lies where the others do.
        parent = context.networks[next(iter(context.networks)) if lineage.parent is None else lineage.parent]
        shared = answer.after.of(parent.id).shared
        state = ModelState.first(inherited(lineage.map, network, parent, shared, seed=context.seed), lineage)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.shared.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ValueError(f"the first weights of network {lineage.id!r} are not those of its settings")
    shared = {name: state.shared[name] for name in network.tensors}
    return replace(state, shared=shared, lineage=lineage, others=MappingProxyType({}))


def _check(terms: Terms, context: EvolutionContext, answer: Evolution) -> None:
    used = {one.id for one in context.lineages}
    in_use = set(context.networks)
    born = [one.id for one in answer.born]
    if len({*born, *used}) < len(born) + len(used) or "" in born:
        raise ValueError(f"networks {born} appear, but each needs an id that none of {sorted(used)} ever had")
    for one in answer.born:
        first = terms.config.model
        asked = (one.config.input_shape, one.config.class_count)
        if asked != (first.input_shape, first.class_count):
            raise ValueError(
                f"network {one.id!r} takes {asked[0]} and tells {asked[1]} classes apart, but the run's take "
                f"{first.input_shape} and tell {first.class_count}"
            )
        if one.parent is not None and one.parent not in in_use:
            raise ValueError(f"network {one.id!r} grows from {one.parent!r}, which is not in use")
        if (one.born_round, one.retired_round) != (context.round, None):
            raise ValueError(f"network {one.id!r} appears after round {context.round}, but says otherwise")
    if not set(answer.retired) <= in_use:
        raise ValueError(f"networks {sorted(answer.retired)} retire, but in use are {sorted(in_use)}")
    if in_use == set(answer.retired) and not born:
        raise ValueError("all networks retire, but one must be in use")
    if set(answer.after.network_ids) != in_use:
        raise ValueError("the model after a round has other networks than the round; name them in `born` or `retired`")
