"""The common interface of eager PyTorch and exported programs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from step_benchmark.data import Samples
from step_benchmark.zoo import ZooModel
from subfleet.protocol.training import OptimiserSettings

Weights = Mapping[str, npt.NDArray[np.float64]]
"""Parameters and floating buffers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a training: a model, its first weights and buffers, and its settings."""

    model: ZooModel
    state: Mapping[str, Tensor]
    optimiser: OptimiserSettings
    learning_rate: float


class Stepper(Protocol):
    """Takes training steps, from the first weights on."""

    def begin(self) -> None:
        """Restart from the first weights; the constructor has already done so."""
        ...

    def prepare(self, samples: Samples) -> Any:
        """Convert a batch to the form that `step` takes."""
        ...

    def step(self, batch: Any) -> float:
        """Take one step, and return the loss before it."""
        ...

    def finish(self) -> Weights:
        """Return the weights; `begin` must follow."""
        ...
