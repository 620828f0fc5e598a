"""What a method decides: frozen parameters and small pure functions over the shared kernel."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch

from subfleet.elastic.network import Network
from subfleet.protocol.messages import Update
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.server.assignment import Candidate

__all__ = ["Method", "Weighting", "weight_of"]

Weighting = Literal["samples", "uniform"]
"""How much an update counts in the mean: by its samples, or 1 each."""


class Method(Protocol):
    """A federated method. Every function is pure and depends on its arguments and the method's parameters alone.

    Attributes:
        TYPE: its name in a configuration.
    """

    TYPE: ClassVar[str]

    def space(self, network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
        """The subnets that may be assigned."""
        ...

    def assign(
        self, candidates: Sequence[Candidate], target: str, budget: Budget, *, below: int | None = None
    ) -> int | None:
        """Place of the candidate for a device with this budget; None leaves the device out of the round.

        Args:
            candidates: the space with its costs, from smallest to largest.
            target: the program target that the device runs.
            budget: what the device can give.
            below: a place whose candidate turned out too large; only smaller ones may be given.
        """
        ...

    def weigh(self, update: Update) -> float:
        """How much an update counts in the mean, above 0."""
        ...

    def training(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        """The local training of a round, made from the configured one with the learning rate of the round."""
        ...

    def after_round(
        self, network: Network, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The model that the next round starts from, given the one before and the one after folding."""
        ...


def weight_of(weighting: Weighting, update: Update) -> float:
    """The weight that a `Weighting` gives to an update."""
    return float(update.sample_count) if weighting == "samples" else 1.0
