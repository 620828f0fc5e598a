"""The model as one client sees it: to train on, and to use."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.model_state import ModelState
from subfleet.elastic.running_statistics import recalibrated
from subfleet.methods.policies import Participant
from subfleet.rounds.state import Terms

__all__ = ["Views"]

_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What clients see of a model.

    Attributes:
        terms: of the run.
        samples: inputs on which running statistics are measured, where the configuration asks for it.
    """

    terms: Terms
    samples: Tensor

    def for_training(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The whole model with the client's own copies in it."""
        return state.seen_with(self.cohorts(state, client))

    def for_use(self, state: ModelState, client: Participant) -> dict[str, Tensor]:
        """The same, with running statistics as evaluation and deployment need them."""
        seen = self.for_training(state, client)
        if not self.terms.policies.recalibrates:
            return seen
        return recalibrated(self.terms.network, seen, client.spec, torch.split(self.samples, _BATCH_SIZE))

    def cohorts(self, state: ModelState, client: Participant) -> Mapping[str, str]:
        """Which copy of each tensor is the client's."""
        return self.terms.policies.cohorts(self.terms.network, client, state.sizes)
