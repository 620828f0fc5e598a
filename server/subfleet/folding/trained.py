"""What of a model devices have trained, and which part of it therefore is the model that is evaluated and kept."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import Roles
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["as_client", "model_of", "still_untrained", "untrained_share"]

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
