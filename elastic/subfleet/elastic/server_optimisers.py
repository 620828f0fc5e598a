"""Server optimisers: the mean change of a round as the gradient of the server's own step (FedOpt).

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2; momentum as in Hsu, Qi and Brown, "Measuring
the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019. With the mean change d of an
element:

    FedAvgM     m = momentum m + d                              w += rate m
    FedAdagrad  m = b1 m + (1 - b1) d    v += d^2               w += rate m / (sqrt v + tau)
    FedAdam                              v = b2 v + (1 - b2) d^2
    FedYogi                              v -= (1 - b2) d^2 sign(v - d^2)

There is no bias correction, and v starts at tau^2. Weights and moments of elements that too few clients trained stay
bit-identical. Running statistics of norms have no moments; they take the plain mean.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Fraction, PositiveAmount

if TYPE_CHECKING:  # settings are also read without PyTorch
    from torch import Tensor

Decay = Annotated[float, Range(least=0, below=1)]

Moments: typing.TypeAlias = "Mapping[str, Mapping[str, Tensor]]"
"""By kind ("mean", "square"), tensors like the model's by name. Empty before the first round."""


def _step(
    optimiser: AnyServerOptimiser,
    old: Mapping[str, Tensor],
    aggregated: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    moments: Moments,
    *,
    buffers: Collection[str] = (),
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Compute the next model and the next moments.

    Args:
        optimiser: the optimiser.
        old: the model at the start of the round.
        aggregated: the aggregated model, from `Accumulator.finish`.
        held: bool masks of the elements that enough clients trained, from `Accumulator.find_held`.
        moments: the moments that the last step returned; empty at first. Missing tensors start from the initial value.
        buffers: names of the tensors that take the aggregated value: running means and variances.
    """
    new = dict(aggregated)
    starts = optimiser.starts()
    after = {kind: dict(moments.get(kind, {})) for kind in starts}
    for name in old.keys() - set(buffers):
        shape = old[name].shape
        before = {kind: after[kind].get(name, old[name].new_full(shape, start)) for kind, start in starts.items()}
        doubles = {kind: moment.double() for kind, moment in before.items()}
        advanced, step = optimiser.advance(doubles, _change(old[name], aggregated[name]))
        new[name] = _apply_step(old[name], aggregated[name], held[name], step)
        for kind, moment in before.items():
            after[kind][name] = advanced[kind].to(moment.dtype).where(held[name], moment)
    return new, after


def _adaptive_starts(settings: ServerAdagrad | ServerAdam | ServerYogi) -> Mapping[str, float]:
    """The initial value of each kind of moment."""
    return {"mean": 0.0, "square": settings.tau**2}


def _advance_adaptively(
    settings: ServerAdagrad | ServerAdam | ServerYogi, mean: Tensor, square: Tensor, change: Tensor
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Decay the mean, and divide the step by the root of the next second moment."""
    mean = settings.beta1 * mean + (1 - settings.beta1) * change
    return {"mean": mean, "square": square}, settings.learning_rate * mean / (square.sqrt() + settings.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ServerMomentum:
    """FedAvg with momentum; with momentum 0 and learning rate 1 it gives the same bits as FedAvg.

    Attributes:
        learning_rate: learning rate of the server, above 0.
        momentum: decay of the mean, at least 0 and below 1.
    """

    TYPE: ClassVar[str] = "fedavgm"
    learning_rate: PositiveAmount = 1.0
    momentum: Decay = 0.9

    step = _step

    def starts(self) -> Mapping[str, float]:
        """The initial value of each kind of moment."""
        return {"mean": 0.0}

    def advance(self, moments: Mapping[str, Tensor], change: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Compute the next moments of a tensor, by kind, and the step of its weights; all float64."""
        mean = self.momentum * moments["mean"] + change
        return {"mean": mean}, self.learning_rate * mean


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ServerAdagrad:
    """FedAdagrad, which sums squares.

    Attributes:
        learning_rate: learning rate of the server, above 0.
        beta1: decay of the mean, at least 0 and below 1.
        tau: added to the divisor, above 0; the larger, the less adaptive the step.
    """

    TYPE: ClassVar[str] = "fedadagrad"
    learning_rate: PositiveAmount = 0.01
    beta1: Decay = 0.0
    tau: PositiveAmount = 1e-3

    starts = _adaptive_starts
    step = _step

    def advance(self, moments: Mapping[str, Tensor], change: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Compute the next moments of a tensor, by kind, and the step of its weights; all float64."""
        return _advance_adaptively(self, moments["mean"], moments["square"] + change.square(), change)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ServerAdam:
    """FedAdam, with a decaying mean of squares.

    Attributes:
        learning_rate: learning rate of the server, above 0.
        beta1: decay of the mean, at least 0 and below 1.
        beta2: decay of the mean of squares, 0 to 1; with 1 it stays at its initial value.
        tau: added to the divisor, above 0; the larger, the less adaptive the step.
    """

    TYPE: ClassVar[str] = "fedadam"
    learning_rate: PositiveAmount = 0.01
    beta1: Decay = 0.9
    beta2: Fraction = 0.99
    tau: PositiveAmount = 1e-3

    starts = _adaptive_starts
    step = _step

    def advance(self, moments: Mapping[str, Tensor], change: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Compute the next moments of a tensor, by kind, and the step of its weights; all float64."""
        square = self.beta2 * moments["square"] + (1 - self.beta2) * change.square()
        return _advance_adaptively(self, moments["mean"], square, change)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ServerYogi:
    """FedYogi, with a mean of squares that changes additively.

    Attributes:
        learning_rate: learning rate of the server, above 0.
        beta1: decay of the mean, at least 0 and below 1.
        beta2: 1 minus the fraction of a square by which the second moment moves, 0 to 1.
        tau: added to the divisor, above 0; the larger, the less adaptive the step.
    """

    TYPE: ClassVar[str] = "fedyogi"
    learning_rate: PositiveAmount = 0.01
    beta1: Decay = 0.9
    beta2: Fraction = 0.99
    tau: PositiveAmount = 1e-3

    starts = _adaptive_starts
    step = _step

    def advance(self, moments: Mapping[str, Tensor], change: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Compute the next moments of a tensor, by kind, and the step of its weights; all float64."""
        before, squared = moments["square"], change.square()
        square = before - (1 - self.beta2) * squared * (before - squared).sign()
        return _advance_adaptively(self, moments["mean"], square, change)


AnyServerOptimiser = ServerMomentum | ServerAdagrad | ServerAdam | ServerYogi
"""Every server optimiser; a configuration selects one by `type`."""

SERVER_OPTIMISERS: Mapping[str, type[AnyServerOptimiser]] = MappingProxyType(
    {kind.TYPE: kind for kind in typing.get_args(AnyServerOptimiser)}
)


def _change(old: Tensor, aggregated: Tensor) -> Tensor:
    return aggregated.double() - old.double()


def _apply_step(old: Tensor, aggregated: Tensor, held: Tensor, step: Tensor) -> Tensor:
    """Add steps to held elements; a step equal to the mean change gives exactly the aggregated value."""
    stepped = aggregated.where(step == _change(old, aggregated), (old.double() + step).to(old.dtype))
    # Steps of 0 are skipped as well, because -0.0 + 0.0 is not -0.0.
    return stepped.where(held & (step != 0), old)
