"""FedAvg on the whole model: a client that cannot carry all of it is left out (the exclusive baseline).

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.

Client half: train the whole model with the given objective; report the change of every tensor.
Server half: the mean of the changes, weighted by samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from subfleet.elastic.network import Network
from subfleet.protocol.messages import Update
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.server.assignment import Candidate, largest_fitting
from subfleet.server.methods.base import Weighting, weight_of

__all__ = ["FedAvg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """Parameters of FedAvg.

    Attributes:
        weighting: "samples" as in the paper, or "uniform".
    """

    TYPE: ClassVar[str] = "fedavg"
    weighting: Weighting = "samples"

    def space(self, network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
        """The whole model alone."""
        return (network.full_spec(),)

    def assign(
        self, candidates: Sequence[Candidate], target: str, budget: Budget, *, below: int | None = None
    ) -> int | None:
        """The whole model where it fits."""
        return largest_fitting(candidates, target, budget, below=below)

    def weigh(self, update: Update) -> float:
        """By samples or uniform, as configured."""
        return weight_of(self.weighting, update)

    def training(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        """As configured, the same in every round."""
        return settings

    def after_round(
        self, network: Network, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The folded model as it is."""
        return after
