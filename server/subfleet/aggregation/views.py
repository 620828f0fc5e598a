"""The model as one client sees it, for training and for use; and the part of it that devices have trained."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.exchanges import embed_submodel
from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import Roles
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext

_BATCH_SIZE = 256


def see_model(roles: Roles, network: Network, state: ModelState, client: Participant) -> dict[str, Tensor]:
    """The whole model with the client's copies; the client receives its submodel of it."""
    seen = state.view_with(roles.aggregator.sharing_groups(network, client, state.sizes))
    if roles.assigner.exchange is None:
        return seen
    return embed_submodel(network, client.architecture, roles.assigner.exchange(network, client, state.kept).down(seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What clients see of a model: each the network that its submodel belongs to.

    Attributes:
        context: of the run.
        samples: inputs for measuring running statistics, if configured.
    """

    context: RunContext
    samples: Tensor

    def find_network(self, state: ModelState, client: Participant) -> Network:
        """The network of a client's submodel.

        Raises:
            ConfigError: it has retired.
        """
        return self.context.declared(state.of(client.architecture.network).lineage).network

    def for_training(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The whole model with the client's copies, see `see_model`."""
        network = self.find_network(state, client)
        return see_model(self.context.roles, network, state.of(network.id), client)

    def for_use(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The same, with running statistics as evaluation and deployment need them."""
        seen, network = self.for_training(state, client), self.find_network(state, client)
        # The statistics of a supernet are means over all paths, so they are those of no path.
        of_no_path = network.config.norm == "batch" and not network.is_path(network.full_architecture())
        if not (self.context.roles.techniques.norms == "recalibrated" or of_no_path):
            return seen
        return recalibrate(network, seen, client.architecture, torch.split(self.samples, _BATCH_SIZE))

    def key(self, state: ModelState, client: Participant) -> tuple[str, ...]:
        """A key that is equal for clients that see the same."""
        roles, network = self.context.roles, self.find_network(state, client)
        own = state.of(network.id)
        pair = "" if roles.assigner.exchange is None else roles.assigner.exchange(network, client, own.kept).key
        sharing_groups = roles.aggregator.sharing_groups(network, client, own.sizes)
        return (
            client.architecture.architecture_id,
            pair,
            *(f"{name}={copy}" for name, copy in sorted(sharing_groups.items())),
        )


Tensors = Mapping[str, Tensor]


def unmark_trained(untrained: Tensors, trained: Iterable[Sequence[Placement]]) -> Tensors:
    """Remove the marks of elements that have been trained.

    Args:
        untrained: as in `ModelState`.
        trained: for each trained submodel, where its tensors lie.
    """
    if not untrained:
        return untrained
    marks = {name: mark.to(torch.int8) for name, mark in untrained.items()}
    for place in (place for places in trained for place in places):
        if place.name in marks:
            own = place.map.extract(marks[place.name]).clone()
            place.map.scatter(-own, marks[place.name])
    return {name: mark.bool() for name, mark in marks.items() if mark.any()}


def measure_untrained(roles: Roles, network: Network, state: ModelState, client: Participant) -> float:
    """The fraction of a client's submodel, as the client sees it, that no device has trained, 0 to 1.

    Args:
        roles: of the run.
        network: the declaration.
        state: of this network.
        client: with its submodel; its copies count.
    """
    # With an exchange, the client's elements are not elements of the model.
    if not state.untrained or roles.assigner.exchange is not None:
        return 0.0
    sharing_groups = roles.aggregator.sharing_groups(network, client, state.sizes)
    lacking = 0
    for name, place in tensor_maps(network, client.architecture).items():
        copied = name in sharing_groups and name in state.copies.get(sharing_groups[name], {})
        if name in state.untrained and not copied:
            lacking += int(place.extract(state.untrained[name]).sum())
    return lacking / sum(math.prod(shape) for shape in network.shapes(client.architecture).values())


def choose_model(
    roles: Roles, network: Network, state: ModelState, clients: Sequence[Participant]
) -> Architecture | None:
    """The submodel of an aggregated network that is the model for all; None if there is none, as in a supernet.

    Args:
        roles: of the run.
        network: the declaration.
        state: with the round's updates; its `model` is still that of the round before.
        clients: with aggregated updates, in the order of their ids.
    """
    full = network.full_architecture()
    if roles.aggregator.personal or network.choices:
        return None
    if roles.aggregator.model == "whole" or not measure_untrained(roles, network, state, imitate_client(network, full)):
        return full
    known = [] if state.model is None else [state.model]
    return max((*known, *(client.architecture for client in clients)), key=network.parameter_count, default=None)


def imitate_client(network: Network, architecture: Architecture) -> Participant:
    """An imaginary client with a submodel, which sees what clients of that size see."""
    return Participant(client_id="", architecture=architecture, size=network.size_of(architecture))
