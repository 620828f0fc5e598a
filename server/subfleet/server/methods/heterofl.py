"""HeteroFL with depth: nested prefix widths and skippable blocks, one mean over whoever holds an element.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3; depth is ours.

Client half: train the given subnet with the given objective; report the change of every tensor.
Server half: each device gets the largest subnet of the space that its budget carries. Changes are scattered to the
prefixes they came from and averaged element by element over the clients that hold the element. An element that nobody
holds keeps its bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.messages import Update
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.server.assignment import Candidate, largest_fitting
from subfleet.server.methods.base import Weighting, weight_of

__all__ = ["HeteroFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFL:
    """Parameters of HeteroFL.

    Attributes:
        weighting: "samples" counts an update by its samples; "uniform" counts each as 1, as the paper's code does.
    """

    TYPE: ClassVar[str] = "heterofl"
    weighting: Weighting = "samples"

    def space(self, network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
        """Every width rate with every depth."""
        return uniform_space(network, rates)

    def assign(
        self, candidates: Sequence[Candidate], target: str, budget: Budget, *, below: int | None = None
    ) -> int | None:
        """The largest candidate that fits."""
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
