"""A third-party network: its construction, its input and its objective."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["ForeignNetwork", "build_seeded", "create_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignNetwork:
    """A third-party or hand-written network with its input and its training.

    Attributes:
        name: its key in `NETWORKS`.
        origin: the package with its code, and the class or function there.
        build: makes the module; its weights are drawn from PyTorch's global random state.
        sample: the input of one sample.
        class_count: logits of a sample, or of a token; 0 if it learns numbers.
        objective: the objective of its training.
        batch_size: samples of one step.
    """

    name: str
    origin: str
    build: Callable[[], nn.Module]
    sample: SampleSpec
    class_count: int = 10
    objective: Literal["cross_entropy", "next_token", "mean_squared_error"] = "cross_entropy"
    batch_size: int = 8


def build_seeded(network: ForeignNetwork, seed: int) -> nn.Module:
    """Build the module in training mode with seeded weights; the global random state is unchanged."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return network.build().train()


def create_step(network: ForeignNetwork, module: nn.Module) -> Step:
    """Its training step, with default SGD settings."""
    return training_step(
        module,
        network.sample,
        batch_size=network.batch_size,
        objective=ObjectiveSettings(name=network.objective),
        optimiser=OptimiserSettings(),
    )
