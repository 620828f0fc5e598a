"""From stored updates to the next state of one network, aggregated in the order of client ids."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, as_tensor

from subfleet.aggregation.updates import UNSCALED, Scaling, map_change, read_change
from subfleet.aggregation.views import choose_model, see_model, unmark_trained
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
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.rounds.context import Declared, RunContext
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import weigh_round
from subfleet.transport.blob_store import BlobStore

_SHARED = ""
_TOGETHER = 8
"""Updates that are added in one pass over the sums, and are in memory at the same time."""
Tensors = Mapping[str, Tensor]
Places = Mapping[str, Sequence[Placement]]
"""By client, where the tensors of its update lie in the model."""


class RefusedError(Exception):
    """One client's update cannot be aggregated."""

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An update to aggregate.

    Attributes:
        form: of the stored update.
        sent: names of the tensors in it; empty for all.
        replacement: what is aggregated in its place, if anything.
    """

    participant: Participant
    weight: float
    ref: BlobRef
    form: UpdateForm
    scaling: Scaling
    sent: frozenset[str]
    exchange: Exchange | None
    replacement: Replacement | None = None

    @property
    def id(self) -> str:
        """Of the client."""
        return self.participant.client_id

    @property
    def architecture(self) -> Architecture:
        """The submodel that moves."""
        if self.replacement is not None:
            return self.replacement.architecture
        return self.participant.architecture if self.exchange is None else self.exchange.moved

    @property
    def partial(self) -> frozenset[str]:
        """Names of the tensors that move; empty for all."""
        return frozenset() if self.replacement is not None else self.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAggregation:
    """How the updates of a round become the next state of a network.

    Attributes:
        context: of the run.
        declared: the network and its space.
        blobs: where the updates are stored.
    """

    context: RunContext
    declared: Declared
    blobs: BlobStore

    @classmethod
    def of(cls, context: RunContext, lineage: Lineage | None, blobs: BlobStore) -> "NetworkAggregation":
        """For one of a run's networks; without a lineage, for the first one."""
        return cls(context=context, declared=context.declared(lineage), blobs=blobs)

    @property
    def network(self) -> Network:
        """The declaration of the network."""
        return self.declared.network

    @property
    def roles(self) -> Roles:
        """Of the run."""
        return self.context.roles

    def aggregate(
        self, state: ModelState, round_number: int, clients: Sequence[ClientState], memory: Any = None
    ) -> ModelState:
        """Aggregate the updates of a round's clients into a state; without any, the state is unchanged.

        Args:
            state: the state that the round started from.
            round_number: of the round.
            clients: with accepted updates of this network's submodels.
            memory: what the method remembers.

        Raises:
            RefusedError: an update cannot be aggregated. Aggregate again without it, so that no sharing group contains
                any of it.
        """
        members = self._collect(state, clients)
        context = AggregationContext(
            network=self.network,
            round=round_number,
            seed=self.context.config.seed,
            before=state,
            after=self._aggregate(state, members),
            clients=tuple(member.participant for member in members),
        )
        after = self._distil(self.roles.aggregator.after_round(context), context, memory)
        return replace(after, model=choose_model(self.roles, self.network, after, context.clients))

    def read_updates(self, state: ModelState, clients: Sequence[ClientState]) -> tuple[ClientUpdate, ...]:
        """The updates of clients, in the order of their ids.

        Raises:
            RefusedError: an update cannot be read.
        """
        return tuple(self._read_update(state, member) for member in self._collect(state, clients))

    def _collect(self, state: ModelState, clients: Sequence[ClientState]) -> list[_Member]:
        weights = weigh_round(self.roles.aggregator.weigh, clients, self.context.config.max_client_fraction)
        members = []
        for client in sorted(clients, key=lambda client: client.client_id):
            participant, update = client.participant, client.update
            if participant is None or update is None:
                raise ValueError(f"client {client.client_id} has no update to aggregate")
            work, exchange = None if client.task is None else client.task.work, self.roles.assigner.exchange
            codec, sent = (work.update_codec, frozenset(work.sends)) if isinstance(work, Train) else (None, frozenset())
            scaling = UNSCALED
            if client.scale != 1:
                groups = self._group(participant, state.sizes)
                own = frozenset(name for name, key in groups.items() if key == client.client_id)
                scaling = Scaling(factor=client.scale, own=own)
            form = UpdateForm.of(self.network, participant.architecture, codec or Uncompressed(), sent)
            members.append(
                _Member(
                    participant=participant,
                    weight=weights[client.client_id].counted,
                    ref=update.blob,
                    form=form,
                    scaling=scaling,
                    sent=sent,
                    exchange=None if exchange is None else exchange(self.network, participant, state.kept),
                )
            )
        return members

    def _group(self, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
        return self.roles.aggregator.sharing_groups(self.network, client, sizes)

    def _distil(self, state: ModelState, context: AggregationContext, memory: Any) -> ModelState:
        """The model after in-place distillation, if there is any."""
        settings = self.roles.techniques.distillation
        if settings is None or not context.clients:
            return state
        draw = Draw(seed=context.seed, round=context.round, client_id="", memory=memory)
        seed = draw.stream("distillation").getrandbits(63)
        space = self.roles.aggregator.taught(self.network, self.declared.space)
        # Students are placed as the method places its clients' submodels.
        students = [
            self.roles.assigner.place(self.network, size, replace(draw, client_id=f"student {place}"))
            for place, size in enumerate(draw_students(self.network, space, len(context.clients), seed))
        ]
        return replace(state, shared=distil(self.network, state.shared, students, settings, seed))

    def _aggregate(self, state: ModelState, members: Sequence[_Member]) -> ModelState:
        sizes = self._add_sizes(state, members)
        groups = {member.id: self._group(member.participant, sizes) for member in members}
        members = self._transform(state, members)
        placed = {
            member.architecture.architecture_id: placements(self.network, member.architecture) for member in members
        }
        shared: Tensors = state.shared
        copies, moments, untrained = dict(state.copies), state.moments, state.untrained
        for key in sorted({_SHARED, *(key for keys in groups.values() for key in keys.values())}):
            places = {
                member.id: tuple(
                    place
                    for place in placed[member.architecture.architecture_id]
                    if (not member.partial or place.local in member.partial)
                    and groups[member.id].get(place.name, _SHARED) == key
                )
                for member in members
            }
            names = {place.name for own in places.values() for place in own}
            start = {
                name: copies.get(key, {}).get(name, tensor) for name, tensor in state.shared.items() if name in names
            }
            holders = [member for member in members if places[member.id]]
            if math.fsum(member.weight for member in holders) <= 0:
                continue
            # An accumulator itself finds the places of whole submodels, once a round.
            explicit = {member.id: places[member.id] for member in holders if groups[member.id] or member.sent}
            new, find_held = self._combine(start, holders, explicit)
            if key == _SHARED:
                new, moments = self._step(start, new, find_held, state.moments)
                shared = {**shared, **new}
                distinct = {(member.architecture.architecture_id, member.sent): places[member.id] for member in holders}
                untrained = unmark_trained(untrained, distinct.values())
            else:
                copies[key] = {**copies.get(key, {}), **new}
        return replace(state, shared=shared, copies=copies, moments=moments, sizes=sizes, untrained=untrained)

    def _add_sizes(self, state: ModelState, members: Sequence[_Member]) -> tuple[Architecture, ...]:
        """The sizes that the next model remembers."""
        if not self.roles.aggregator.groups_by_sizes:
            return ()
        sizes = (*state.sizes, *(member.participant.size for member in members))
        by_id = {size.architecture_id: size for size in sizes}
        return tuple(by_id[architecture_id] for architecture_id in sorted(by_id))

    def _average(
        self, start: Tensors, members: Sequence[_Member], places: Places
    ) -> tuple[Tensors, Callable[[], Tensors]]:
        """The mean of the members' changes, and a function that finds the elements that any of them held."""
        accumulator = Accumulator(
            self.network,
            start,
            total_weight=math.fsum(member.weight for member in members),
            min_contributors=self.roles.aggregator.min_contributors(self.network),
        )
        for first in range(0, len(members), _TOGETHER):
            batch = members[first : first + _TOGETHER]
            contributions = [
                Contribution(
                    architecture=member.architecture,
                    change=self._read_change(member),
                    weight=member.weight,
                    placements=places.get(member.id),
                    factors=self.roles.aggregator.factors(self.network, member.participant),
                    sent=member.partial,
                )
                for member in batch
            ]
            try:
                accumulator.add_many(contributions)
            except ProtocolError:
                # None of them was added; one by one, they show which of them cannot be.
                for member, contribution in zip(batch, contributions, strict=True):
                    try:
                        accumulator.add_many([contribution])
                    except ProtocolError as error:
                        raise RefusedError(member.id, str(error)) from error
        return accumulator.finish(), accumulator.find_held

    def _combine(
        self, start: Tensors, members: Sequence[_Member], places: Places
    ) -> tuple[Tensors, Callable[[], Tensors]]:
        """The mean of the members' changes, or their robust aggregate, which reads all of them tensor by tensor."""
        rule = self.roles.techniques.robust_aggregation
        if rule is None:
            return self._average(start, members, places)
        with ExitStack() as stack:
            changes = [self._open_change(member, stack) for member in members]
            stacked = [self._stack(member, places) for member in members]
            read = partial(_select_tensor, changes, start)
            new = aggregate_robustly(rule, Stack(network=self.network, state=start, members=stacked, read=read))
        return new, partial(find_held_elements, self.network, start, stacked)

    def _stack(self, member: _Member, places: Places) -> StackMember:
        """A member of robust aggregation, without what counts nothing in a mean or belongs to other copies."""
        factors = self.roles.aggregator.factors(self.network, member.participant)
        counted = {name: as_tensor(factor) > 0 for name, factor in factors.items()}
        if member.id in places:
            here = {place.name for place in places[member.id]}
            elsewhere = self.network.shapes(member.architecture).keys() - here
            counted |= dict.fromkeys(elsewhere, as_tensor(False))
        return StackMember(architecture=member.architecture, weight=member.weight, counted=counted)

    def _step(
        self, old: Tensors, aggregated: Tensors, find_held: Callable[[], Tensors], moments: Moments
    ) -> tuple[Tensors, Moments]:
        """The shared model after the step of the server optimiser, if there is one."""
        optimiser = self.roles.techniques.server_optimiser
        if optimiser is None:
            return aggregated, moments
        buffers = [name for name in old if self.network.tensors[name].role in BUFFER_ROLES]
        return optimiser.step(old, aggregated, find_held(), moments, buffers=buffers)

    def _transform(self, state: ModelState, members: Sequence[_Member]) -> Sequence[_Member]:
        """The members with the replacements of their updates."""
        if self.roles.aggregator.transform is None:
            return members
        updates = [self._read_update(state, member) for member in members]
        replacements = self.roles.aggregator.transform(self.network, state.shared, updates)
        return [replace(member, replacement=new) for member, new in zip(members, replacements, strict=True)]

    def _read_update(self, state: ModelState, member: _Member) -> ClientUpdate:
        seen = see_model(self.roles, self.network, state, member.participant)
        received = extract(self.network, member.participant.architecture, seen)
        change = {name: tensor.to(received[name].device) for name, tensor in self._read_sent(member).items()}
        return ClientUpdate(
            client=member.participant,
            weight=member.weight,
            received=received,
            change=change,
            exchange=member.exchange,
        )

    def _read_change(self, member: _Member) -> Tensors:
        """The change of the submodel that moves."""
        if member.replacement is not None:
            return member.replacement.change
        sent = self._read_sent(member)
        return sent if member.exchange is None else member.exchange.up(sent)

    def _open_change(self, member: _Member, stack: ExitStack) -> Tensors:
        """The same, read from its file when a tensor is needed, if possible."""
        if member.replacement is not None or member.exchange is not None:
            return self._read_change(member)
        try:
            return stack.enter_context(map_change(member.form, self.blobs, member.ref, member.scaling))
        except (ProtocolError, FileError) as error:
            raise RefusedError(member.id, str(error)) from error

    def _read_sent(self, member: _Member) -> Tensors:
        """The change of the client's own tensors."""
        try:
            return read_change(member.form, self.blobs, member.ref, member.scaling)
        except (ProtocolError, FileError) as error:
            raise RefusedError(member.id, str(error)) from error


def _select_tensor(changes: Sequence[Tensors], start: Tensors, name: str) -> list[Tensor | None]:
    """By member, its change of a tensor, on the tensor's device; None if it lacks the tensor."""
    return [change[name].to(start[name].device) if name in change else None for change in changes]
