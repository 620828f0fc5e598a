"""Server optimisers: the mean change of a round as the gradient of the server's own step (FedOpt).

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2; momentum as in Hsu, Qi and Brown, "Measuring
the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019. With the mean change d of an
element:

    FedAvgM     m = momentum m + d                              w += rate m
    FedAdagrad  m = b1 m + (1 - b1) d    v += d^2               w += rate m / (sqrt v + tau)
    FedAdam                              v = b2 v + (1 - b2) d^2
    FedYogi                              v -= (1 - b2) d^2 sign(v - d^2)

There is no bias correction, and v starts at tau^2. Elements that too few clients trained move neither weight nor
moment, by a bit; nor do running statistics of norms have moments: they take the plain mean.
"""

import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from subfleet.protocol.errors import ConfigError

__all__ = [
    "SERVER_OPTIMISERS",
    "AnyServerOptimiser",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Moments",
    "ServerOptimiser",
]

Moments = Mapping[str, Mapping[str, Tensor]]
"""Of each kind ("mean", "square") a tensor like the model's, by name. Empty before the first round."""


class ServerOptimiser(Protocol):
    """Settings of a server optimiser and its pure step.

    Attributes:
        TYPE: its name in a configuration.
    """

    TYPE: ClassVar[str]

    def step(
        self,
        old: Mapping[str, Tensor],
        folded: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        moments: Moments,
        *,
        buffers: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """The next model and the next moments.

        Args:
            old: the model that the round started from.
            folded: the mean of what clients learned, as `Accumulator.finish` gives it.
            held: bool, which elements enough clients trained, as `Accumulator.held` gives it.
            moments: what the last step returned; empty at first. Tensors that it lacks start anew.
            buffers: names of tensors that take the folded value: running means and variances.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgM:
    """FedAvg with momentum; with momentum 0 and rate 1 it is FedAvg, bit by bit.

    Attributes:
        learning_rate: of the server, above 0.
        momentum: 0 up to, not including, 1.
    """

    TYPE: ClassVar[str] = "fedavgm"
    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_above_0(self, "learning_rate")
        _check_decay(self, "momentum")

    def step(
        self,
        old: Mapping[str, Tensor],
        folded: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        moments: Moments,
        *,
        buffers: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """As `ServerOptimiser.step`."""
        new, means = dict(folded), dict(moments.get("mean", {}))
        for name in old.keys() - set(buffers):
            change = _change(old[name], folded[name])
            before = means.get(name, torch.zeros_like(old[name]))
            mean = self.momentum * before.to(torch.float64) + change
            new[name] = _moved(old[name], folded[name], held[name], self.learning_rate * mean)
            means[name] = _kept(before, held[name], mean)
        return new, {"mean": means}


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad:
    """Sums of squares.

    Attributes:
        learning_rate: of the server, above 0.
        beta1: decay of the mean, 0 up to, not including, 1.
        tau: added to the divisor, above 0; how little adaptive the step is.
    """

    TYPE: ClassVar[str] = "fedadagrad"
    learning_rate: float = 0.01
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_above_0(self, "learning_rate", "tau")
        _check_decay(self, "beta1")

    def step(
        self,
        old: Mapping[str, Tensor],
        folded: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        moments: Moments,
        *,
        buffers: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """As `ServerOptimiser.step`."""
        return _adaptive_step(self, old, folded, held, moments, buffers)

    def square(self, before: Tensor, change: Tensor) -> Tensor:
        """The next second moment."""
        return before + change.square()


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam:
    """A decaying mean of squares.

    Attributes:
        learning_rate: of the server, above 0.
        beta1: decay of the mean, 0 up to, not including, 1.
        beta2: decay of the mean of squares, 0 to 1; with 1 it keeps its start.
        tau: added to the divisor, above 0; how little adaptive the step is.
    """

    TYPE: ClassVar[str] = "fedadam"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_above_0(self, "learning_rate", "tau")
        _check_decay(self, "beta1")
        _check_share(self, "beta2")

    def step(
        self,
        old: Mapping[str, Tensor],
        folded: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        moments: Moments,
        *,
        buffers: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """As `ServerOptimiser.step`."""
        return _adaptive_step(self, old, folded, held, moments, buffers)

    def square(self, before: Tensor, change: Tensor) -> Tensor:
        """The next second moment."""
        return self.beta2 * before + (1 - self.beta2) * change.square()


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi:
    """A mean of squares that grows fast and decays slowly.

    Attributes:
        learning_rate: of the server, above 0.
        beta1: decay of the mean, 0 up to, not including, 1.
        beta2: 1 minus the share of a square by which the second moment moves, 0 to 1.
        tau: added to the divisor, above 0; how little adaptive the step is.
    """

    TYPE: ClassVar[str] = "fedyogi"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_above_0(self, "learning_rate", "tau")
        _check_decay(self, "beta1")
        _check_share(self, "beta2")

    def step(
        self,
        old: Mapping[str, Tensor],
        folded: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        moments: Moments,
        *,
        buffers: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """As `ServerOptimiser.step`."""
        return _adaptive_step(self, old, folded, held, moments, buffers)

    def square(self, before: Tensor, change: Tensor) -> Tensor:
        """The next second moment."""
        squared = change.square()
        return before - (1 - self.beta2) * squared * torch.sign(before - squared)


AnyServerOptimiser = FedAvgM | FedAdagrad | FedAdam | FedYogi
"""Every server optimiser, as a configuration's `type` chooses one."""

SERVER_OPTIMISERS: Mapping[str, type[AnyServerOptimiser]] = MappingProxyType(
    {kind.TYPE: kind for kind in typing.get_args(AnyServerOptimiser)}
)


def _adaptive_step(
    settings: FedAdagrad | FedAdam | FedYogi,
    old: Mapping[str, Tensor],
    folded: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    moments: Moments,
    buffers: Collection[str],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    new = dict(folded)
    means, squares = dict(moments.get("mean", {})), dict(moments.get("square", {}))
    for name in old.keys() - set(buffers):
        change = _change(old[name], folded[name])
        mean_before = means.get(name, torch.zeros_like(old[name]))
        square_before = squares.get(name, torch.full_like(old[name], settings.tau**2))
        mean = settings.beta1 * mean_before.to(torch.float64) + (1 - settings.beta1) * change
        square = settings.square(square_before.to(torch.float64), change)
        step = settings.learning_rate * mean / (square.sqrt() + settings.tau)
        new[name] = _moved(old[name], folded[name], held[name], step)
        means[name] = _kept(mean_before, held[name], mean)
        squares[name] = _kept(square_before, held[name], square)
    return new, {"mean": means, "square": squares}


def _change(old: Tensor, folded: Tensor) -> Tensor:
    return folded.to(torch.float64) - old.to(torch.float64)


def _moved(old: Tensor, folded: Tensor, held: Tensor, step: Tensor) -> Tensor:
    """The old values and their steps where held; a step of just the mean change gives the folded bits."""
    stepped = torch.where(step == _change(old, folded), folded, (old.to(torch.float64) + step).to(old.dtype))
    # A step of 0 is left out as well: -0.0 + 0.0 would not be -0.0.
    return torch.where(held & (step != 0), stepped, old)


def _kept(before: Tensor, held: Tensor, after: Tensor) -> Tensor:
    return torch.where(held, after.to(before.dtype), before)


def _check_above_0(settings: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(settings, name)}, but must be a number above 0")


def _check_decay(settings: object, name: str) -> None:
    if not 0 <= getattr(settings, name) < 1:
        raise ConfigError(f"{name} is {getattr(settings, name)}, but must be at least 0 and below 1")


def _check_share(settings: object, name: str) -> None:
    if not 0 <= getattr(settings, name) <= 1:
        raise ConfigError(f"{name} is {getattr(settings, name)}, but must be from 0 to 1")
