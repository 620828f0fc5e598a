"""From stored updates to the next state of one network: aggregated in the order of client ids."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, as_tensor

from subfleet.aggregation.updates import AS_IT_IS, Scaling, mapped_change, read_change
from subfleet.aggregation.views import model_of, seen_by, still_untrained
from subfleet.elastic.accumulator import Accumulator, Contribution
from subfleet.elastic.distillation import distil, draw_students
from subfleet.elastic.exchanges import Exchange
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.maps import Placement, extract, placements
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.elastic.robust_rules import Stack, StackMember, aggregate_robustly, find_held_elements
from subfleet.elastic.server_optimisers import Moments
from subfleet.elastic.update_form import UpdateForm
from subfleet.methods.aggregator import AggregationContext, ClientUpdate, Participant, Replacement
from subfleet.methods.assigner import Draw
from subfleet.methods.roles import Roles
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import weigh_round
from subfleet.transport.blob_store import BlobStore

__all__ = ["NetworkAggregation", "RefusedError"]

_SHARED = ""
_TOGETHER = 8
"""Updates that are added in one pass over the sums: they are in memory at once."""
Tensors = Mapping[str, Tensor]


class RefusedError(Exception):
    """One client's update cannot be aggregated."""

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAggregation:
    """How the updates of a round become the next state of a network.

    Attributes:
        network: its declaration.
        roles: of the run.
        space: the sizes that clients may have.
        blobs: where the updates are stored.
        seed: of the run.
        max_client_fraction: of the weights of a round, that one client's may have; 1 lowers none, see
            `client_fraction`.
    """

    network: Network
    roles: Roles
    space: tuple[Architecture, ...]
    blobs: BlobStore
    seed: int = 0
    max_client_fraction: float | None = 1.0

    @classmethod
    def of(cls, context: RunContext, lineage: Lineage | None, blobs: BlobStore) -> "NetworkAggregation":
        """As a run's configuration has it, of one of its networks; without a lineage that which it begins with."""
        config, declared = context.config, context.declared(lineage)
        return cls(
            network=declared.network,
            roles=context.roles,
            space=declared.space,
            blobs=blobs,
            seed=config.seed,
            max_client_fraction=config.max_client_fraction,
        )

    def aggregate(
        self, state: ModelState, round_number: int, clients: Sequence[ClientState], memory: Any = None
    ) -> ModelState:
        """Aggregate the updates of a round's client states into a state; without any, it stays as it is.

        Args:
            state: that the round started from.
            round_number: of the round.
            clients: with accepted updates of this network's submodels.
            memory: what the method remembers.

        Raises:
            RefusedError: the update of a client cannot be aggregated. Aggregate once more without it, so that nothing
                of it is left in any sharing group.
        """
        members = self._clients(state, clients)
        context = AggregationContext(
            network=self.network,
            round=round_number,
            seed=self.seed,
            before=state,
            after=self._aggregated(state, members),
            clients=tuple(client.participant for client in members),
        )
        after = self._taught(self.roles.aggregator.after_round(context), context, memory)
        return replace(after, model=model_of(self.roles, self.network, after, context.clients))

    def trained(self, state: ModelState, clients: Sequence[ClientState]) -> tuple[ClientUpdate, ...]:
        """What each client trained, in the order of their ids.

        Raises:
            RefusedError: an update cannot be read.
        """
        return tuple(self._trained(state, client) for client in self._clients(state, clients))

    def _clients(self, state: ModelState, clients: Sequence[ClientState]) -> "list[_Client]":
        weights = weigh_round(self.roles.aggregator.weigh, clients, self.max_client_fraction)
        ordered = sorted(clients, key=lambda one: one.client_id)
        return [self._client(state, client, weights[client.client_id].counted) for client in ordered]

    def _taught(self, state: ModelState, context: AggregationContext, memory: Any) -> ModelState:
        """The model after in-place distillation, where that is wanted."""
        settings = self.roles.techniques.distillation
        if settings is None or not context.clients:
            return state
        draw = Draw(seed=self.seed, round=context.round, client_id="", memory=memory)
        seed = draw.stream("distillation").getrandbits(63)
        space = self.roles.aggregator.taught(self.network, self.space)
        sizes = draw_students(self.network, space, len(context.clients), seed)
        # Where the method puts its clients' submodels, too.
        students = [
            self.roles.assigner.place(self.network, size, replace(draw, client_id=f"student {place}"))
            for place, size in enumerate(sizes)
        ]
        return replace(state, shared=distil(self.network, state.shared, students, settings, seed))

    def _client(self, state: ModelState, client: ClientState, weight: float) -> "_Client":
        if client.participant is None or client.update is None:
            raise ValueError(f"the client state of client {client.client_id} has no update")
        pair, work = self.roles.assigner.exchange, None if client.task is None else client.task.work
        return _Client(
            participant=client.participant,
            weight=weight,
            update_ref=client.update.blob,
            codec=work.update_codec if isinstance(work, Train) else Uncompressed(),
            sent=frozenset(work.sends if isinstance(work, Train) else ()),
            scaling=self._scaling(state, client.participant, client.scale),
            exchange=None if pair is None else pair(self.network, client.participant, state.kept),
        )

    def _scaling(self, state: ModelState, client: Participant, factor: float) -> Scaling:
        """What a client's change is multiplied by; what it has to itself it never is."""
        if factor == 1:
            return AS_IT_IS
        sharing_groups = self.roles.aggregator.sharing_groups(self.network, client, state.sizes)
        return Scaling(
            factor=factor, own=frozenset(name for name, key in sharing_groups.items() if key == client.client_id)
        )

    def _aggregated(self, state: ModelState, clients: Sequence["_Client"]) -> ModelState:
        sizes = self._sizes_with(state, clients)
        sharing_groups = {
            client.participant.client_id: self.roles.aggregator.sharing_groups(self.network, client.participant, sizes)
            for client in clients
        }
        clients = self._transformed(state, clients)
        own = {client.architecture.architecture_id: placements(self.network, client.architecture) for client in clients}
        copies = dict(state.copies)
        shared: Tensors = state.shared
        moments: Moments = state.moments
        untrained: Tensors = state.untrained
        for key in sorted({_SHARED, *(key for keys in sharing_groups.values() for key in keys.values())}):
            places = {
                client.participant.client_id: _in_sharing_group(
                    client.moved(own[client.architecture.architecture_id]),
                    sharing_groups[client.participant.client_id],
                    key,
                )
                for client in clients
            }
            names = {place.name for found in places.values() for place in found}
            start = {
                name: copies.get(key, {}).get(name, tensor) for name, tensor in state.shared.items() if name in names
            }
            members = [client for client in clients if places[client.participant.client_id]]
            if math.fsum(client.weight for client in members) <= 0:
                continue
            # An accumulator finds the places of a submodel once a round, where nothing else is said.
            elsewhere = {
                client.participant.client_id: places[client.participant.client_id]
                for client in members
                if sharing_groups[client.participant.client_id] or client.sent
            }
            aggregate = self._averaged if self.roles.techniques.robust_aggregation is None else self._aggregate_robustly
            new, held = aggregate(start, members, elsewhere)
            if key == _SHARED:
                new, moments = self._stepped(start, new, held, state.moments)
                shared = {**shared, **new}
                untrained = still_untrained(untrained, _distinct(members, places))
            else:
                copies[key] = {**copies.get(key, {}), **new}
        return replace(state, shared=shared, copies=copies, moments=moments, sizes=sizes, untrained=untrained)

    def _sizes_with(self, state: ModelState, clients: Sequence["_Client"]) -> tuple[Architecture, ...]:
        """The sizes that the next model remembers."""
        if not self.roles.aggregator.groups_by_sizes:
            return ()
        found = {
            size.architecture_id: size for size in (*state.sizes, *(client.participant.size for client in clients))
        }
        return tuple(found[architecture_id] for architecture_id in sorted(found))

    def _averaged(
        self, start: Tensors, members: Sequence["_Client"], places: Mapping[str, Sequence[Placement]]
    ) -> tuple[Tensors, Callable[[], Tensors]]:
        """The mean of the members' changes, and what tells which elements any of them held."""
        accumulator = Accumulator(
            self.network,
            start,
            total_weight=math.fsum(client.weight for client in members),
            min_contributors=self.roles.aggregator.min_contributors(self.network),
        )
        for first in range(0, len(members), _TOGETHER):
            batch = [self._contribution(client, places) for client in members[first : first + _TOGETHER]]
            try:
                accumulator.add_many(batch)
            except ProtocolError:
                # Nothing of them was added; one by one they show which of them it is.
                _add_each(accumulator, members[first:], batch)
        return accumulator.finish(), accumulator.find_held

    def _contribution(self, client: "_Client", places: Mapping[str, Sequence[Placement]]) -> Contribution:
        return Contribution(
            architecture=client.architecture,
            change=self._change_of(client),
            weight=client.weight,
            placements=places.get(client.participant.client_id),
            factors=self.roles.aggregator.factors(self.network, client.participant),
            sent=() if client.instead is not None else client.sent,
        )

    def _aggregate_robustly(
        self, start: Tensors, members: Sequence["_Client"], places: Mapping[str, Sequence[Placement]]
    ) -> tuple[Tensors, Callable[[], Tensors]]:
        """The robust aggregate of the members' changes, which looks at all of them, tensor by tensor."""
        if self.roles.techniques.robust_aggregation is None:
            return self._averaged(start, members, places)
        with ExitStack() as stack:
            changes = [self._open(client, stack) for client in members]
            who = [self._member(client, places) for client in members]
            read = partial(_of_each, changes, start)
            new = aggregate_robustly(
                self.roles.techniques.robust_aggregation,
                Stack(network=self.network, state=start, members=who, read=read),
            )
        return new, partial(find_held_elements, self.network, start, who)

    def _member(self, client: "_Client", places: Mapping[str, Sequence[Placement]]) -> StackMember:
        """A client of robust aggregation; what counts nothing in a mean or belongs to another copy is not held."""
        factors = self.roles.aggregator.factors(self.network, client.participant)
        counted = {name: as_tensor(factor) > 0 for name, factor in factors.items()}
        if client.participant.client_id in places:
            mine = {place.name for place in places[client.participant.client_id]}
            elsewhere = self.network.shapes(client.architecture).keys() - mine
            counted |= dict.fromkeys(elsewhere, as_tensor(False))
        return StackMember(architecture=client.architecture, weight=client.weight, counted=counted)

    def _open(self, client: "_Client", stack: ExitStack) -> Mapping[str, Tensor]:
        if client.instead is not None or client.exchange is not None:
            return self._change_of(client)
        try:
            return stack.enter_context(
                mapped_change(self._form_of(client), self.blobs, client.update_ref, client.scaling)
            )
        except (ProtocolError, FileError) as error:
            raise RefusedError(client.participant.client_id, str(error)) from error

    def _stepped(
        self, old: Tensors, aggregated: Tensors, held: Callable[[], Tensors], moments: Moments
    ) -> tuple[Tensors, Moments]:
        """The shared model after the server optimiser's step, where there is one."""
        optimiser = self.roles.techniques.server_optimiser
        if optimiser is None:
            return aggregated, moments
        buffers = [name for name in old if self.network.tensors[name].role in BUFFER_ROLES]
        return optimiser.step(old, aggregated, held(), moments, buffers=buffers)

    def _transformed(self, state: ModelState, clients: Sequence["_Client"]) -> Sequence["_Client"]:
        """The clients with what is aggregated in place of their own updates."""
        if self.roles.aggregator.transform is None:
            return clients
        trained = [self._trained(state, client) for client in clients]
        replacements = self.roles.aggregator.transform(self.network, state.shared, trained)
        return [replace(client, instead=one) for client, one in zip(clients, replacements, strict=True)]

    def _trained(self, state: ModelState, client: "_Client") -> ClientUpdate:
        seen = seen_by(self.roles, self.network, state, client.participant)
        received = extract(self.network, client.participant.architecture, seen)
        change = {name: one.to(received[name].device) for name, one in self._sent_by(client).items()}
        return ClientUpdate(
            client=client.participant,
            weight=client.weight,
            received=received,
            change=change,
            exchange=client.exchange,
        )

    def _change_of(self, client: "_Client") -> Mapping[str, Tensor]:
        """Of the tensors of the submodel that is moved."""
        if client.instead is not None:
            return client.instead.change
        sent = self._sent_by(client)
        return sent if client.exchange is None else client.exchange.up(sent)

    def _sent_by(self, client: "_Client") -> Mapping[str, Tensor]:
        """Of the client's own tensors."""
        try:
            return read_change(self._form_of(client), self.blobs, client.update_ref, client.scaling)
        except (ProtocolError, FileError) as error:
            raise RefusedError(client.participant.client_id, str(error)) from error

    def _form_of(self, client: "_Client") -> UpdateForm:
        return UpdateForm.of(self.network, client.participant.architecture, client.codec, client.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    participant: Participant
    weight: float
    update_ref: BlobRef
    codec: AnyUpdateCodec
    scaling: Scaling = AS_IT_IS
    sent: frozenset[str] = frozenset()
    exchange: Exchange | None = None
    instead: Replacement | None = None

    @property
    def architecture(self) -> Architecture:
        """The submodel whose tensors are moved."""
        if self.instead is not None:
            return self.instead.architecture
        return self.participant.architecture if self.exchange is None else self.exchange.moved

    def moved(self, places: Sequence[Placement]) -> Sequence[Placement]:
        """Of the places of its submodel's tensors, those whose change it has sent."""
        if not self.sent or self.instead is not None:
            return places
        return [place for place in places if place.local in self.sent]


def _in_sharing_group(places: Sequence[Placement], keys: Mapping[str, str], key: str) -> tuple[Placement, ...]:
    """Of the places of a client's update, those in a sharing group."""
    return tuple(place for place in places if keys.get(place.name, _SHARED) == key)


def _distinct(members: Sequence[_Client], places: Mapping[str, Sequence[Placement]]) -> tuple[Sequence[Placement], ...]:
    """The places of some clients' updates, those of one submodel and the same tensors once."""
    return tuple(
        {(one.architecture.architecture_id, one.sent): places[one.participant.client_id] for one in members}.values()
    )


def _of_each(changes: Sequence[Mapping[str, Tensor]], start: Tensors, name: str) -> list[Tensor | None]:
    """What each changed a tensor by, where that is; None where it lacks it."""
    return [change[name].to(start[name].device) if name in change else None for change in changes]


def _add_each(accumulator: Accumulator, members: Sequence[_Client], batch: Sequence[Contribution]) -> None:
    for client, one in zip(members, batch, strict=False):
        try:
            accumulator.add_many([one])
        except ProtocolError as error:
            raise RefusedError(client.participant.client_id, str(error)) from error
