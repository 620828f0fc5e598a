"""The model as one client sees it, for training and for use; and the part of it that devices have trained."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.exchanges import Exchange, embed_submodel
from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.elastic.update_form import list_frozen
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import Roles
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext

_BATCH_SIZE = 256
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One network of a model as a client sees it.

    Attributes:
        network: that the client's submodel belongs to.
        state: of this network.
        client: with its submodel.
        groups: the client's sharing group by tensor name; unnamed tensors are shared by all.
        exchange: maps between the model and the client's own network; None if that is a slice of the model.
    """

    network: Network
    state: ModelState
    client: Participant
    groups: Mapping[str, str]
    exchange: Exchange | None

    @classmethod
    def of(cls, roles: Roles, network: Network, state: ModelState, client: Participant) -> "View":
        """What a client sees in a run with these roles."""
        exchange = roles.assigner.exchange
        return cls(
            network=network,
            state=state,
            client=client,
            groups=roles.aggregator.sharing_groups(network, client, state.sizes),
            exchange=None if exchange is None else exchange(network, client, state.kept),
        )

    @property
    def key(self) -> tuple[str, ...]:
        """A key that is equal for clients that see the same."""
        pair = "" if self.exchange is None else self.exchange.key
        groups = (f"{name}={group}" for name, group in sorted(self.groups.items()))
        return (self.client.architecture.architecture_id, pair, *groups)

    @property
    def own(self) -> frozenset[str]:
        """Names of the client's personalised tensors."""
        return frozenset(name for name, group in self.groups.items() if group == self.client.client_id)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The whole model with the client's copies; the client receives its submodel of it."""
        seen = self.state.view_with(self.groups)
        if self.exchange is None:
            return seen
        return embed_submodel(self.network, self.client.architecture, self.exchange.down(seen))

    @property
    def untrained(self) -> float:
        """The fraction of the submodel that no device has trained but should, 0 to 1; the client's copies count."""
        # With an exchange, the client's elements are not elements of the model.
        if not self.state.untrained or self.exchange is not None:
            return 0.0
        maps = tensor_maps(self.network, self.client.architecture)
        marked = self.state.untrained.keys() - list_frozen(self.network)
        shared = (name for name in maps if name not in self.state.copies.get(self.groups.get(name, ""), {}))
        lacking = sum(int(maps[name].extract(self.state.untrained[name]).sum()) for name in shared if name in marked)
        return lacking / sum(math.prod(shape) for shape in self.network.shapes(self.client.architecture).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What the clients of a run see of its model.

    Attributes:
        context: of the run.
        samples: inputs for measuring running statistics, if configured.
    """

    context: RunContext
    samples: Tensor

    def of(self, model: ModelState, client: Participant) -> View:
        """The network of a client's submodel, as the client sees it.

        Raises:
            ConfigError: the network has retired.
        """
        state = model.of(client.architecture.network)
        return View.of(self.context.roles, self.context.get_declared(state.lineage).network, state, client)

    def prepare_tensors(self, view: View) -> dict[str, Tensor]:
        """The tensors of a view with running statistics as evaluation and deployment need them."""
        network = view.network
        # The statistics of a supernet are means over all paths, so they are those of no path.
        of_no_path = network.config.norm == "batch" and not network.is_path(network.full_architecture())
        if not (self.context.roles.techniques.norms == "recalibrated" or of_no_path):
            return view.tensors
        return recalibrate(network, view.tensors, view.client.architecture, torch.split(self.samples, _BATCH_SIZE))


def unmark_trained(untrained: Tensors, trained: Iterable[Sequence[Placement]]) -> Tensors:
    """Remove the marks of elements that have been trained.

    Args:
        untrained: as in `ModelState`.
        trained: for each trained submodel, the placements of its tensors.
    """
    if not untrained:
        return untrained
    marks = {name: mark.to(torch.int8) for name, mark in untrained.items()}
    for placement in (placement for placements in trained for placement in placements):
        if placement.name in marks:
            own = placement.map.extract(marks[placement.name]).clone()
            placement.map.scatter(-own, marks[placement.name])
    return {name: mark.bool() for name, mark in marks.items() if mark.any()}


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
    if roles.aggregator.model == "whole" or not View.of(roles, network, state, imitate_client(network, full)).untrained:
        return full
    known = [] if state.model is None else [state.model]
    return max((*known, *(client.architecture for client in clients)), key=network.parameter_count, default=None)


def imitate_client(network: Network, architecture: Architecture) -> Participant:
    """An imaginary client with a submodel, which sees what clients of that size see."""
    return Participant(client_id="", architecture=architecture, size=network.size_of(architecture))
