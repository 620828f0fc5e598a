"""The aggregator of a method: how the updates of a round become the model. By default it is a mean by samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import SearchSpace
from subfleet.protocol.messages import Update
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:
    import torch

    from subfleet.elastic import exchanges, model_state

    Tensor = torch.Tensor
    Exchange = exchanges.Exchange
    ModelState = model_state.ModelState
else:  # methods are read where no PyTorch is; these types are for annotations alone
    Tensor = Exchange = ModelState = Any

__all__ = ["AggregationContext", "Aggregator", "ClientUpdate", "Participant", "Replacement", "Weighting", "weigh_by"]

Weighting = Literal["samples", "uniform"]
"""The weight of an update in the mean: its number of samples, or 1."""
COUNTED_EQUALLY = "each client counts as 1"
"""The departure from papers that weight updates by samples."""
COUNTED_BY_SAMPLES = "an update counts by its samples"
"""The departure from papers that give every update the same weight."""

ModelKind = Literal["trained", "whole", "client", "architecture", "cluster", "tier", "network"]
"""What a method's model is. One model for all clients:

"trained"       the whole network if devices have trained all of it, else the largest submodel that one has trained
"whole"         the whole network; clients train its parts in turn, and the untrained fraction is reported

One model for each client, reported as a mean:

"client"        its personalised model
"architecture"  the model of all clients of its architecture
"cluster"       the model of its cluster
"tier"          the model of its tier of devices
"network"       one of the run's networks
"""
_PERSONALISED: Mapping[str, str] = MappingProxyType(
    {
        "client": "its own model",
        "architecture": "its architecture's model",
        "cluster": "its cluster's model",
        "tier": "its tier's network",
        "network": "its own network",
    }
)
"""The kinds with a model for each client, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """The model that a round's accuracy belongs to.

    Attributes:
        kind: the method's, or "paths" of a supernet, which predicts nothing as a whole.
        submodel: display name of one model for all; empty for the whole network.
        architecture_id: identity of that submodel.
        network: id of its network; empty for the one that the run began with.
        count: how many models the accuracy is the mean of: 1 for all, else one for each client or path.
        untrained: fraction of the evaluated parameters that no device has trained, 0 to 1.
    """

    kind: Literal[ModelKind, "paths"]
    submodel: str = ""
    architecture_id: str = ""
    network: str = ""
    count: int = 1
    untrained: float = 0.0

    @property
    def description(self) -> str:
        """In words, such as "the full model" or "the mean of 5 devices, each with its own model"."""
        if self.kind == "paths":
            text = f"the mean of {self.count} random paths of the supernet"
        elif self.kind in _PERSONALISED:
            text = f"the mean of {self.count} device{'s' * (self.count != 1)}, each with {_PERSONALISED[self.kind]}"
        else:
            text = f"submodel {self.submodel}, the largest that devices have trained" if self.submodel else ""
        return self._with_untrained(text or "the full model")

    @property
    def short(self) -> str:
        """For a table: "full", the name of a submodel, or who has personalised models, such as "each client"."""
        if self.kind in _PERSONALISED:
            return self._with_untrained(f"each {self.kind}")
        return self._with_untrained("random paths" if self.kind == "paths" else self.submodel or "full")

    def _with_untrained(self, text: str) -> str:
        return f"{text}, {max(self.untrained, 0.001):.1%} untrained" if self.untrained else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A client as methods know it.

    Attributes:
        architecture: its submodel, as placed in the model.
        size: the same submodel at the front of every axis; its programs and costs depend on nothing else.
        class_counts: samples of each of the run's classes in its data.
        examples: if it drew paths of a subspace, the examples that went through each operator of each choice.
    """

    client_id: str
    architecture: Architecture
    size: Architecture
    class_counts: tuple[int, ...] = ()
    examples: OperatorExamples = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientUpdate:
    """What one client's training changed.

    Attributes:
        weight: its weight in the mean.
        received: the weights that it began with, by name of the submodel's tensors.
        change: trained minus received, by the same names.
        exchange: the pair of maps between its network and the model; None if its network is a slice of the model.
    """

    client: Participant
    weight: float
    received: Mapping[str, Tensor]
    change: Mapping[str, Tensor]
    exchange: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What is aggregated for one client in place of its update.

    Attributes:
        architecture: the submodel that moves, which may differ from the trained one.
        change: of each of its tensors, by name.
    """

    architecture: Architecture
    change: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationContext:
    """A round after aggregation, from which the next model follows.

    Attributes:
        before: the model that the round started from.
        after: the model with all updates in it.
        clients: the clients that sent these updates.
    """

    network: Network
    round: int
    seed: int
    before: ModelState
    after: ModelState
    clients: tuple[Participant, ...]


def count_samples(update: Update) -> float:
    """Weight an update by the samples that it was trained on."""
    return float(update.sample_count)


def weigh_by(weighting: Weighting) -> Callable[[Update], float]:
    """The function `Aggregator.weigh` of a weighting."""
    return count_samples if weighting == "samples" else (lambda update: 1.0)


def share_everything(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    """Give all clients the same copy of every tensor."""
    return {}


def keep_aggregate(context: AggregationContext) -> ModelState:
    """Start the next round from the aggregated model."""
    return context.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator:
    """How the updates of a round become the model. Each function is pure.

    Attributes:
        weigh: the weight of an update in the mean, above 0.
        factors: by tensor of the model, a factor from 0 to 1 on a client's weight there: a number, or a tensor that
            broadcasts against the client's own. Robust aggregation has no weights: there, a client holds the elements
            with a factor above 0.
        min_contributors: of a network, how many clients must hold an element for it to move; 1 or more.
        sharing_groups: the copy of each tensor that a client trains, by tensor name; tensors without a key are shared
            by all. Its last argument has the sizes of all clients with an update in the model if `groups_by_sizes` is
            set, else none.
        groups_by_sizes: sharing groups depend on the sizes of other clients, so the model remembers all sizes.
        transform: from the network, the weights that the round started from and its updates, in the order of client
            ids, the replacements that are aggregated; None aggregates the updates. All of them are in memory at once.
        after_round: the model that the next round starts from.
        taught: from the network's sizes, the submodels that in-place distillation teaches.
        model: what the method's model is; it is evaluated after each round and reported.
    """

    weigh: Callable[[Update], float] = count_samples
    factors: Callable[[Network, Participant], Mapping[str, float | Tensor]] = lambda network, client: {}
    min_contributors: Callable[[Network], int] = lambda network: 1
    sharing_groups: Callable[[Network, Participant, Sequence[Architecture]], Mapping[str, str]] = share_everything
    groups_by_sizes: bool = False
    transform: Callable[[Network, Mapping[str, Tensor], Sequence[ClientUpdate]], Sequence[Replacement]] | None = None
    after_round: Callable[[AggregationContext], ModelState] = keep_aggregate
    taught: Callable[[Network, Sequence[Architecture]], Sequence[Architecture] | SearchSpace] = lambda network, sizes: (
        sizes
    )
    model: ModelKind = "trained"

    @property
    def personal(self) -> bool:
        """Whether each client has a personalised model, so that no model is common to all."""
        return self.model in _PERSONALISED
