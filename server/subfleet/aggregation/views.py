"""The model as one client sees it, to train on and to use; and which part of it devices have trained."""

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

__all__ = ["Views", "as_client", "model_of", "seen_by", "still_untrained", "untrained_fraction"]

_BATCH_SIZE = 256


def seen_by(roles: Roles, network: Network, state: ModelState, client: Participant) -> dict[str, Tensor]:
    """The whole model with the client's own copies in it; what is cut from it at its submodel is what it receives."""
    seen = state.view_with(roles.aggregator.sharing_groups(network, client, state.sizes))
    if roles.assigner.exchange is None:
        return seen
    return embed_submodel(network, client.architecture, roles.assigner.exchange(network, client, state.kept).down(seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What clients see of a model, each of the network that its submodel is of.

    Attributes:
        context: of the run.
        samples: inputs on which running statistics are measured, where the configuration asks for it.
    """

    context: RunContext
    samples: Tensor

    def network_of(self, state: ModelState, client: Participant) -> Network:
        """The network of a client's submodel.

        Raises:
            ConfigError: it has retired.
        """
        return self.context.declared(state.of(client.architecture.network).lineage).network

    def for_training(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The whole model with the client's own copies in it, see `seen_by`."""
        network = self.network_of(state, client)
        return seen_by(self.context.roles, network, state.of(network.id), client)

    def for_use(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The same, with running statistics as evaluation and deployment need them."""
        seen, network = self.for_training(state, client), self.network_of(state, client)
        # Those of a supernet are means over all of its paths, and of none of them.
        of_no_path = network.config.norm == "batch" and not network.is_path(network.full_architecture())
        if not (self.context.roles.techniques.recalibrates or of_no_path):
            return seen
        return recalibrate(network, seen, client.architecture, torch.split(self.samples, _BATCH_SIZE))

    def key(self, state: ModelState, client: Participant) -> tuple[str, ...]:
        """Equal for clients that see the same of a model."""
        roles, network = self.context.roles, self.network_of(state, client)
        own = state.of(network.id)
        pair = "" if roles.assigner.exchange is None else roles.assigner.exchange(network, client, own.kept).key
        sharing_groups = roles.aggregator.sharing_groups(network, client, own.sizes)
        return (
            client.architecture.architecture_id,
            pair,
            *(f"{name}={copy}" for name, copy in sorted(sharing_groups.items())),
        )


Tensors = Mapping[str, Tensor]


def still_untrained(untrained: Tensors, trained: Iterable[Sequence[Placement]]) -> Tensors:
    """The marks of what nobody has trained, once some submodels were.

    Args:
        untrained: as in `ModelState`.
        trained: where the tensors of each submodel lie; equal ones may be named once.
    """
    if not untrained:
        return untrained
    marks = {name: mark.to(torch.int8) for name, mark in untrained.items()}
    for place in (place for places in trained for place in places):
        if place.name in marks:
            own = place.map.extract(marks[place.name]).clone()
            place.map.scatter(-own, marks[place.name])
    return {name: mark.bool() for name, mark in marks.items() if mark.any()}


def untrained_fraction(roles: Roles, network: Network, state: ModelState, client: Participant) -> float:
    """Fraction of the elements of a client's submodel, as the client sees it, that no device has trained, 0 to 1.

    Args:
        roles: of the run.
        network: the declaration.
        state: of this network.
        client: whose copies count, with its submodel.
    """
    # With an exchange, the elements of a client are no elements of the model.
    if not state.untrained or roles.assigner.exchange is not None:
        return 0.0
    sharing_groups = roles.aggregator.sharing_groups(network, client, state.sizes)
    lacking = 0
    for name, place in tensor_maps(network, client.architecture).items():
        copied = name in sharing_groups and name in state.copies.get(sharing_groups[name], {})
        if name in state.untrained and not copied:
            lacking += int(place.extract(state.untrained[name]).sum())
    return lacking / sum(math.prod(shape) for shape in network.shapes(client.architecture).values())


def model_of(roles: Roles, network: Network, state: ModelState, clients: Sequence[Participant]) -> Architecture | None:
    """The submodel of an aggregated network that is the model for all; None where there is none, as in a supernet.

    Args:
        roles: of the run.
        network: the declaration.
        state: with the updates of the round in it; its `model` is that of the round before.
        clients: whose updates were aggregated, in the order of their ids.
    """
    full = network.full_architecture()
    if roles.aggregator.personal or network.choices:
        return None
    if roles.aggregator.model == "whole" or not untrained_fraction(roles, network, state, as_client(network, full)):
        return full
    known = [] if state.model is None else [state.model]
    return max((*known, *(client.architecture for client in clients)), key=network.parameter_count, default=None)


def as_client(network: Network, architecture: Architecture) -> Participant:
    """Nobody in particular with a submodel: who sees of each tensor what clients of that size see."""
    return Participant(client_id="", architecture=architecture, size=network.size_of(architecture))
