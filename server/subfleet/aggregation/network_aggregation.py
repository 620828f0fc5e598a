"""From stored updates to the next state of one network, aggregated in the order of client ids."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, as_tensor

from subfleet.aggregation.update_ranges import UpdateRanges
from subfleet.aggregation.updates import open_update
from subfleet.aggregation.views import Tensors, View, choose_model, unmark_trained
from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.contributions import Contribution, split_batches
from subfleet.elastic.distillation import distil, draw_students
from subfleet.elastic.maps import Placement, extract, placements
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.elastic.robust_rules import Stack, StackMember, aggregate_robustly, find_held_elements
from subfleet.elastic.update_form import UpdateForm
from subfleet.methods.aggregator import AggregationContext, ClientUpdate, Participant
from subfleet.methods.assigner import Draw
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.ongoing import compute_staleness
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import weigh_round
from subfleet.transport.blob_store import BlobStore

_SHARED = ""
Combined = tuple[Tensors, Callable[[], Tensors]]
"""The tensors after the members' changes, and a function that finds the elements that any of them held."""
Places = Mapping[str, Sequence[Placement]]
"""By client, where the tensors of its update lie in the model."""


class RefusedError(Exception):
    """One client's update cannot be aggregated."""

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id


@contextmanager
def _refusing(client_id: str) -> Iterator[None]:
    """Refuse the update of a client if it cannot be used."""
    try:
        yield
    except (ProtocolError, FileError) as error:
        raise RefusedError(client_id, str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An update to aggregate.

    Attributes:
        view: what the client received.
        weight: of the update in the mean.
        open: opens the stored changes of the client's own tensors.
        measure: finds the largest absolute change of each of them.
        architecture: the submodel that moves.
        sent: names of its tensors that move; empty for all.
        replacement: the changes that are aggregated in place of the stored ones, if any.
    """

    view: View
    weight: float
    open: Callable[[], Tensors]
    measure: Callable[[], Mapping[str, float]]
    architecture: Architecture
    sent: frozenset[str]
    replacement: Tensors | None = None

    @property
    def client(self) -> Participant:
        """The client, with its submodel."""
        return self.view.client

    @property
    def id(self) -> str:
        """Of the client."""
        return self.client.client_id

    def open_change(self) -> Tensors:
        """The changes of the submodel that moves. Raises RefusedError if the update cannot be read."""
        if self.replacement is not None:
            return self.replacement
        with _refusing(self.id):
            sent = self.open()
            return sent if self.view.exchange is None else self.view.exchange.up(sent)

    def find_largest(self) -> Mapping[str, float] | None:
        """The largest absolute change of each tensor of the submodel that moves; None if it is unknown."""
        if self.replacement is not None:
            return {name: float(change.abs().max()) for name, change in self.replacement.items() if change.numel()}
        if self.view.exchange is not None:
            return None
        with _refusing(self.id):
            return self.measure()

    def read(self) -> ClientUpdate:
        """The update as methods get it. Raises RefusedError if it cannot be read."""
        received = extract(self.view.network, self.client.architecture, self.view.tensors)
        with _refusing(self.id):
            change = {name: tensor.to(received[name].device) for name, tensor in self.open().items()}
        return ClientUpdate(
            client=self.client, weight=self.weight, received=received, change=change, exchange=self.view.exchange
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAggregation:
    """How the updates of a round become the next state of a network.

    Attributes:
        context: of the run.
        blobs: where the updates are stored.
        ranges: knows how large the changes are.
        state: of the network alone, from which the round started.
        round: number of the round.
        clients: with accepted updates of this network's submodels, in the order of their ids.
        memory: what the method remembers.
    """

    context: RunContext
    blobs: BlobStore
    ranges: UpdateRanges
    state: ModelState
    round: int
    clients: Sequence[ClientState]
    memory: Any

    @property
    def network(self) -> Network:
        """The declaration of the network."""
        return self.context.get_declared(self.state.lineage).network

    def aggregate(self) -> ModelState:
        """Aggregate the updates into a state; without any, the state is unchanged.

        Raises:
            RefusedError: an update cannot be aggregated. Aggregate again without it, so that no sharing group contains
                any of it.
        """
        members = self._collect()
        context = AggregationContext(
            network=self.network,
            round=self.round,
            seed=self.context.config.seed,
            before=self.state,
            after=self._aggregate(members),
            clients=tuple(member.client for member in members),
        )
        after = self._distil(self.context.roles.aggregator.after_round(context), context)
        return replace(after, model=choose_model(self.context.roles, self.network, after, context.clients))

    def read_updates(self) -> tuple[ClientUpdate, ...]:
        """The updates, in the order of their clients' ids.

        Raises:
            RefusedError: an update cannot be read.
        """
        return tuple(member.read() for member in self._collect())

    def _collect(self) -> list[_Member]:
        roles, members = self.context.roles, []
        mapped = roles.techniques.robust_aggregation is not None  # it holds the updates of all clients at once
        weights = weigh_round(roles.aggregator.weigh, self.clients, self.context.config.max_client_fraction)
        for client in self.clients:
            participant, update, work = client.participant, client.update, client.task and client.task.work
            if participant is None or update is None or not isinstance(work, Train):
                raise ValueError(f"client {client.client_id} has no update to aggregate")
            view, sent = View.of(roles, self.network, self.state, participant), frozenset(work.sends)
            form = UpdateForm.of(self.network, participant.architecture, work.update_codec, sent)
            members.append(
                _Member(
                    view=view,
                    weight=weights[client.client_id].counted,
                    open=partial(
                        open_update,
                        form,
                        self.blobs,
                        update.blob,
                        scale=client.scale * self._find_factor(client),
                        own=view.own,
                        mapped=mapped,
                    ),
                    measure=partial(self.ranges.find, form, self.blobs, update.blob),
                    architecture=participant.architecture if view.exchange is None else view.exchange.moved,
                    sent=sent,
                )
            )
        return members

    def _find_factor(self, client: ClientState) -> float:
        """The factor on a client's changes for the age of the model that it began with, above 0 and at most 1."""
        settings = self.context.config.asynchronous
        return 1.0 if settings is None else settings.compute_factor(compute_staleness(self.round, client))

    def _distil(self, state: ModelState, context: AggregationContext) -> ModelState:
        """The model after in-place distillation, if there is any."""
        settings = self.context.roles.techniques.distillation
        if settings is None or not context.clients:
            return state
        draw = Draw(seed=context.seed, round=context.round, client_id="", memory=self.memory)
        seed = draw.stream("distillation").getrandbits(63)
        space = self.context.roles.aggregator.taught(self.network, self.context.get_declared(self.state.lineage).space)
        # Students are placed as the method places its clients' submodels.
        students = [
            self.context.roles.assigner.place(self.network, size, replace(draw, client_id=f"student {index}"))
            for index, size in enumerate(draw_students(self.network, space, len(context.clients), seed))
        ]
        return replace(state, shared=distil(self.network, state.shared, students, settings, seed))

    def _aggregate(self, members: Sequence[_Member]) -> ModelState:
        state, aggregator = self.state, self.context.roles.aggregator
        sizes = self._add_sizes(members)
        groups = {member.id: aggregator.sharing_groups(self.network, member.client, sizes) for member in members}
        members = self._transform(members)
        architectures = {member.architecture.architecture_id: member.architecture for member in members}
        placed = {name: placements(self.network, architecture) for name, architecture in architectures.items()}
        shared: Tensors = state.shared
        copies, moments, untrained = dict(state.copies), state.moments, state.untrained
        optimiser = self.context.roles.techniques.server_optimiser
        for key in sorted({_SHARED, *(key for keys in groups.values() for key in keys.values())}):
            places = {
                member.id: tuple(
                    placement
                    for placement in placed[member.architecture.architecture_id]
                    if (not member.sent or placement.local in member.sent)
                    and groups[member.id].get(placement.name, _SHARED) == key
                )
                for member in members
            }
            names = {placement.name for own in places.values() for placement in own}
            start = {
                name: copies.get(key, {}).get(name, tensor) for name, tensor in state.shared.items() if name in names
            }
            holders = [member for member in members if places[member.id]]
            if math.fsum(member.weight for member in holders) <= 0:
                continue
            # An accumulator itself finds the places of whole submodels, once a round.
            explicit = {member.id: places[member.id] for member in holders if groups[member.id] or member.sent}
            new, find_held = self._combine(start, holders, explicit, places)
            if key == _SHARED:
                if optimiser is not None:
                    buffers = [name for name in start if self.network.tensors[name].role in BUFFER_ROLES]
                    new, moments = optimiser.step(start, new, find_held(), moments, buffers=buffers)
                shared = {**shared, **new}
                distinct = {(member.architecture.architecture_id, member.sent): places[member.id] for member in holders}
                untrained = unmark_trained(untrained, distinct.values())
            else:
                copies[key] = {**copies.get(key, {}), **new}
        return replace(state, shared=shared, copies=copies, moments=moments, sizes=sizes, untrained=untrained)

    def _add_sizes(self, members: Sequence[_Member]) -> tuple[Architecture, ...]:
        """The sizes that the next model remembers."""
        if not self.context.roles.aggregator.groups_by_sizes:
            return ()
        sizes = (*self.state.sizes, *(member.client.size for member in members))
        by_id = {size.architecture_id: size for size in sizes}
        return tuple(by_id[architecture_id] for architecture_id in sorted(by_id))

    def _average(self, start: Tensors, members: Sequence[_Member], explicit: Places, places: Places) -> Combined:
        """The mean of the members' changes."""
        accumulator = Accumulator(
            self.network,
            start,
            total_weight=math.fsum(member.weight for member in members),
            largest=_find_largest(members, places),
            min_contributors=self.context.roles.aggregator.min_contributors(self.network),
        )
        for together in split_batches([self.network.parameter_count(member.architecture) for member in members]):
            batch = members[together]
            contributions = [
                Contribution(
                    architecture=member.architecture,
                    change=member.open_change(),
                    weight=member.weight,
                    placements=explicit.get(member.id),
                    factors=self.context.roles.aggregator.factors(self.network, member.client),
                    sent=member.sent,
                )
                for member in batch
            ]
            try:
                accumulator.add_many(contributions)
            except ProtocolError:
                # None of them was added; one by one, they show which of them cannot be.
                for member, contribution in zip(batch, contributions, strict=True):
                    with _refusing(member.id):
                        accumulator.add_many([contribution])
        return accumulator.finish(), accumulator.find_held

    def _combine(self, start: Tensors, members: Sequence[_Member], explicit: Places, places: Places) -> Combined:
        """The mean of the members' changes, or their robust aggregate, which reads all of them tensor by tensor.

        Args:
            start: the tensors before.
            members: with changes of any of them.
            explicit: places of the members that add only some of their tensors.
            places: those of all members.
        """
        rule = self.context.roles.techniques.robust_aggregation
        if rule is None:
            return self._average(start, members, explicit, places)
        changes = [member.open_change() for member in members]
        stacked = [self._stack(member, explicit) for member in members]
        read = partial(_select_tensor, changes, start)
        new = aggregate_robustly(rule, Stack(network=self.network, state=start, members=stacked, read=read))
        return new, partial(find_held_elements, self.network, start, stacked)

    def _stack(self, member: _Member, places: Places) -> StackMember:
        """A member of robust aggregation, without what counts nothing in a mean or belongs to other copies."""
        factors = self.context.roles.aggregator.factors(self.network, member.client)
        counted = {name: as_tensor(factor) > 0 for name, factor in factors.items()}
        if member.id in places:
            here = {placement.name for placement in places[member.id]}
            elsewhere = self.network.shapes(member.architecture).keys() - here
            counted |= dict.fromkeys(elsewhere, as_tensor(False))
        return StackMember(architecture=member.architecture, weight=member.weight, counted=counted)

    def _transform(self, members: Sequence[_Member]) -> Sequence[_Member]:
        """The members with the replacements of their updates."""
        transform = self.context.roles.aggregator.transform
        if transform is None:
            return members
        replacements = transform(self.network, self.state.shared, [member.read() for member in members])
        return [
            replace(member, architecture=new.architecture, sent=frozenset(), replacement=new.change)
            for member, new in zip(members, replacements, strict=True)
        ]


def _find_largest(members: Sequence[_Member], places: Places) -> Mapping[str, float]:
    """The largest absolute change of each tensor of the model; none where it is unknown for a member."""
    largest = dict[str, float]()
    for member in members:
        found = member.find_largest()
        if found is None:
            return {}
        for placement in places[member.id]:
            reached = max(largest.get(placement.name, 0.0), found.get(placement.local, 0.0))
            largest[placement.name] = reached
    return largest


def _select_tensor(changes: Sequence[Tensors], start: Tensors, name: str) -> list[Tensor | None]:
    """By member, its change of a tensor, on the tensor's device; None if it lacks the tensor."""
    return [change[name].to(start[name].device) if name in change else None for change in changes]
