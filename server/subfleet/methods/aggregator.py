"""The aggregator of a method: how the updates of a round become the model. By default it is a mean by samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import SearchSpace
from subfleet.methods.describing import Published
from subfleet.methods.model_kinds import FOR_ALL, ModelKind
from subfleet.protocol.messages import Update
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is; tensors are passed through
    from torch import Tensor

    from subfleet.elastic.exchanges import Exchange
    from subfleet.elastic.model_state import ModelState

__all__ = [
    "BY_SAMPLES",
    "UNIFORM",
    "AggregationContext",
    "Aggregator",
    "ClientUpdate",
    "Participant",
    "Replacement",
    "Weighting",
    "as_aggregated",
    "by_samples",
    "shared_by_all",
    "weigh_by",
]

Weighting = Literal["samples", "uniform"]
"""How much an update counts in the mean: by its samples, or 1 each."""
BY_SAMPLES = Published(value="samples", told="each client counts as 1")
UNIFORM = Published(value="uniform", told="an update counts by its samples")
"""Of `Weighting`, in papers that have the one or the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A client as far as methods know it.

    Attributes:
        architecture: its submodel, as placed in the model.
        size: the same kept at the front of every axis: all that its programs and costs depend on.
        class_counts: samples of each of the run's classes in its data.
        examples: where it drew paths of a subspace, how many examples went through each operator of each choice.
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
        weight: how much it counts in the mean.
        received: the weights that it began with.
        change: trained minus received, both by name of the submodel's tensors.
        exchange: the pair of maps between its network and the model; None where that is a slice.
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
        architecture: the submodel that is moved; not always the one that was trained.
        change: of each of its tensors, by name.
    """

    architecture: Architecture
    change: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationContext:
    """A round whose updates have been aggregated, and from which the next model follows.

    Attributes:
        before: the model that the round started from.
        after: the model with all updates in it.
        clients: the ones that sent these updates.
    """

    network: Network
    round: int
    seed: int
    before: ModelState
    after: ModelState
    clients: tuple[Participant, ...]


def by_samples(update: Update) -> float:
    """An update counts by the samples that it was trained on."""
    return float(update.sample_count)


def weigh_by(weighting: Weighting) -> Callable[[Update], float]:
    """How much an update counts."""
    return by_samples if weighting == "samples" else (lambda update: 1.0)


def shared_by_all(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    """Every tensor is the same for every client."""
    return {}


def as_aggregated(context: AggregationContext) -> ModelState:
    """The next round starts from the aggregated model."""
    return context.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator:
    """How the updates of a round become the model. Each function is pure.

    Attributes:
        weigh: how much an update counts in the mean, above 0.
        factors: by tensor of the model, a factor from 0 to 1 on a client's weight there: a number, or a tensor that
            broadcasts against the client's own. Robust aggregation knows no weights: for it, a client holds what has a
            factor above 0.
        min_contributors: of a network, how many clients must hold an element for it to move; 1 or more.
        sharing_groups: which copy of each tensor a client trains, by tensor name; tensors without a name are shared by
            all. It is given the sizes of the clients with an update in the model where `groups_by_sizes` is set, else
            none.
        groups_by_sizes: sharing groups depend on what sizes others have; the model then remembers all of them.
        transform: the network, the weights that the round started from and its updates, in the order of client ids, to
            what is aggregated in their place; None aggregates them as they are. It needs the memory of them all.
        after_round: the model that the next round starts from.
        taught: the network's sizes to the space of the submodels that in-place distillation teaches.
        model: what the method's model is, which is evaluated after each round and reported: one for all, or one that
            each client has; see `subfleet.methods.model_kinds`.
    """

    weigh: Callable[[Update], float] = by_samples
    factors: Callable[[Network, Participant], Mapping[str, float | Tensor]] = lambda network, client: {}
    min_contributors: Callable[[Network], int] = lambda network: 1
    sharing_groups: Callable[[Network, Participant, Sequence[Architecture]], Mapping[str, str]] = shared_by_all
    groups_by_sizes: bool = False
    transform: Callable[[Network, Mapping[str, Tensor], Sequence[ClientUpdate]], Sequence[Replacement]] | None = None
    after_round: Callable[[AggregationContext], ModelState] = as_aggregated
    taught: Callable[[Network, Sequence[Architecture]], Sequence[Architecture] | SearchSpace] = lambda network, sizes: (
        sizes
    )
    model: ModelKind = "trained"

    @property
    def personal(self) -> bool:
        """Whether each client has a personalised model, and there is none for all."""
        return self.model not in FOR_ALL
