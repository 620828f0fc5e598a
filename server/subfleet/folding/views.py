"""The model as one client sees it: to train on, and to use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.exchanges import in_place
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrated
from subfleet.methods.aggregator import Participant
from subfleet.methods.roles import Roles
from subfleet.rounds.terms import Terms

__all__ = ["Views", "seen_by"]

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
