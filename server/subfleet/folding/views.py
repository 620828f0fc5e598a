"""The model as one client sees it, to train on and to use; and which part of it devices have trained."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.exchanges import in_place
from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrated
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import Roles
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.terms import Terms

__all__ = ["Views", "as_client", "model_of", "seen_by", "still_untrained", "untrained_share"]

_BATCH_SIZE = 256


def seen_by(roles: Roles, network: Network, state: ModelState, client: Participant) -> dict[str, Tensor]:
    """The whole model with the client's own copies in it; what is cut from it at its subnet is what it receives."""
    seen = state.seen_with(roles.aggregator.sharing_groups(network, client, state.sizes))
    if roles.assigner.exchange is None:
        return seen
    return in_place(network, client.spec, roles.assigner.exchange(network, client, state.kept).down(seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What clients see of a model, each of the network that its subnet is of.

    Attributes:
        terms: of the run.
        samples: inputs on which running statistics are measured, where the configuration asks for it.
    """

    terms: Terms
    samples: Tensor

    def network_of(self, state: ModelState, client: Participant) -> Network:
        """The network of a client's subnet.

        Raises:
            ConfigError: it has retired.
        """
        return self.terms.declared(state.of(client.spec.network).lineage).network

    def for_training(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The whole model with the client's own copies in it, see `seen_by`."""
        network = self.network_of(state, client)
        return seen_by(self.terms.roles, network, state.of(network.id), client)

    def for_use(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The same, with running statistics as evaluation and deployment need them."""
        seen, network = self.for_training(state, client), self.network_of(state, client)
        # Those of a supernet are means over all of its paths, and of none of them.
        of_no_path = network.config.norm == "batch" and not network.is_path(network.full_spec())
        if not (self.terms.roles.techniques.recalibrates or of_no_path):
            return seen
        return recalibrated(network, seen, client.spec, torch.split(self.samples, _BATCH_SIZE))

    def key(self, state: ModelState, client: Participant) -> tuple[str, ...]:
        """Equal for clients that see the same of a model."""
        roles, network = self.terms.roles, self.network_of(state, client)
        own = state.of(network.id)
        pair = "" if roles.assigner.exchange is None else roles.assigner.exchange(network, client, own.kept).key
        cohorts = roles.aggregator.sharing_groups(network, client, own.sizes)
        return (client.spec.spec_id, pair, *(f"{name}={copy}" for name, copy in sorted(cohorts.items())))


Tensors = Mapping[str, Tensor]


def still_untrained(untrained: Tensors, trained: Iterable[Sequence[Placement]]) -> Tensors:
    """The marks of what nobody has trained, once some subnets were.

    Args:
        untrained: as in `ModelState`.
        trained: where the tensors of each subnet lie; equal ones may be named once.
    """
    if not untrained:
        return untrained
    marks = {name: mark.to(torch.int8) for name, mark in untrained.items()}
    for place in (place for places in trained for place in places):
        if place.name in marks:
            own = place.map.extract(marks[place.name]).clone()
            place.map.scatter(-own, marks[place.name])
    return {name: mark.bool() for name, mark in marks.items() if mark.any()}


def untrained_share(roles: Roles, network: Network, state: ModelState, client: Participant) -> float:
    """Share of the elements of a client's subnet, as the client sees it, that no device has trained, 0 to 1.

    Args:
        roles: of the run.
        network: the declaration.
        state: of this network.
        client: whose copies count, with its subnet.
    """
    # With an exchange, the elements of a client are no elements of the model.
    if not state.untrained or roles.assigner.exchange is not None:
        return 0.0
    cohorts = roles.aggregator.sharing_groups(network, client, state.sizes)
    lacking = 0
    for name, place in tensor_maps(network, client.spec).items():
        copied = name in cohorts and name in state.copies.get(cohorts[name], {})
        if name in state.untrained and not copied:
            lacking += int(place.extract(state.untrained[name]).sum())
    return lacking / sum(math.prod(shape) for shape in network.shapes(client.spec).values())


def model_of(roles: Roles, network: Network, state: ModelState, clients: Sequence[Participant]) -> SubnetSpec | None:
    """The subnet of a folded network that is the model for all; None where there is none, and none of a supernet.

    Args:
        roles: of the run.
        network: the declaration.
        state: with the updates of the round in it; its `model` is that of the round before.
        clients: whose updates were folded, in the order of their ids.
    """
    full = network.full_spec()
    if roles.aggregator.personal or network.choices:
        return None
    if roles.aggregator.model == "whole" or not untrained_share(roles, network, state, as_client(network, full)):
        return full
    known = [] if state.model is None else [state.model]
    return max((*known, *(client.spec for client in clients)), key=network.parameter_count, default=None)


def as_client(network: Network, spec: SubnetSpec) -> Participant:
    """Nobody in particular with a subnet: who sees of each tensor what clients of that size see."""
    return Participant(client_id="", spec=spec, size=network.size_of(spec))
