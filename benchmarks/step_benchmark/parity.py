"""Distance of a program from PyTorch in double precision, compared with that of PyTorch in single precision.

A rounding error becomes a jump if the input of a ReLU or max pooling rounds to the other side: one element's gradient
appears or disappears, which is thousands of times a rounding error. Measured on these networks, it happens in one of
five first steps with contiguous tensors and in three of five with channels last. So a distance after one step is the
median over several first batches, and PyTorch's own also over its memory layouts; their root mean square, including
jumps, is reported too.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from step_benchmark.data import Samples
from step_benchmark.eager import EagerStep
from step_benchmark.stepping import Start, Stepper, Weights

STEPS = 10
STARTS = 5
FREE_DISTANCE = 1e-6
"""The allowed error of a tensor's update after one step, whatever PyTorch's error."""
VANISHING = 1e-6
"""A tensor with an exact update this small relative to the others has none: a bias before a norm, a key's bias. Its
distance is divided by the usual size of an update of its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The distances of a program's steps from PyTorch's.

    Attributes:
        one_step_over_eager: the worst tensor's distance of the update after one step, less `FREE_DISTANCE`, divided by
            eager's; at most 4 is good.
        one_step_worst_tensor: its name.
        one_step_distance: that tensor's distance.
        one_step_rms_over_eager: as `one_step_over_eager`, of root mean squares instead of medians.
        distance_over_eager: distance of all parameters' update after `STEPS`, divided by eager's.
        worst_tensor_over_eager: the same for the worst parameter or buffer.
        eager_distance: eager's distance after `STEPS`.
        max_abs_diff: largest difference of a weight or buffer after one step.
        eager_max_abs_diff: the same for eager.
        loss_fall: relative decrease of the loss from the first two steps to the last two.
    """

    one_step_over_eager: float
    one_step_worst_tensor: str
    one_step_distance: float
    one_step_rms_over_eager: float
    distance_over_eager: float
    worst_tensor_over_eager: float
    eager_distance: float
    max_abs_diff: float
    eager_max_abs_diff: float
    loss_fall: float


@dataclass(kw_only=True)
class Differences:
    """By tensor, the squared length of each run's difference from the exact weights."""

    squares: dict[str, list[float]] = field(default_factory=dict)
    largest: float = 0.0

    def add(self, exact: Weights, other: Weights) -> None:
        """Add one run."""
        for name, right in exact.items():
            difference = other[name] - right
            self.squares.setdefault(name, []).append(float(np.sum(difference**2)))
            self.largest = max(self.largest, float(np.abs(difference).max(initial=0.0)))

    def rms(self, names: Sequence[str]) -> float:
        """Root mean square over the runs, of some tensors taken as one vector."""
        return math.sqrt(sum(statistics.fmean(self.squares[name]) for name in names))

    def median(self, names: Sequence[str]) -> float:
        """Median over the runs, of some tensors taken as one vector."""
        return math.sqrt(statistics.median(map(sum, zip(*(self.squares[name] for name in names), strict=True))))


@dataclass(kw_only=True)
class _Distances:
    """The exact update after one step or all steps, and each runner's distance from it."""

    update: Differences = field(default_factory=Differences)
    eager: Differences = field(default_factory=Differences)
    programs: dict[str, Differences] = field(default_factory=dict)

    def measure_lengths(self, sizes: Mapping[str, int], parameters: Sequence[str]) -> dict[str, float]:
        """The length of each tensor's exact update, or the usual length if it vanishes."""
        usual = self.update.rms(parameters) / math.sqrt(sum(sizes[name] for name in parameters))
        lengths = {}
        for name, size in sizes.items():
            length, expected = self.update.rms([name]), usual * math.sqrt(size)
            lengths[name] = length if length > VANISHING * expected else expected
        return lengths


def compare(
    start: Start, samples: Samples, programs: Mapping[str, Stepper], *, layouts: Sequence[str]
) -> dict[str, Parity]:
    """Take the same steps with PyTorch in double and in single precision, and with programs.

    Args:
        start: the common start.
        samples: `STARTS` batches.
        programs: programs by target.
        layouts: memory layouts of PyTorch in single precision.
    """
    first = {name: tensor.double().numpy() for name, tensor in start.state.items() if tensor.is_floating_point()}
    exact = EagerStep(start, dtype=torch.float64)
    eager: list[Stepper] = [EagerStep(start, layout=layout) for layout in layouts]
    one_step, all_steps = (_Distances(programs={target: Differences() for target in programs}) for _ in range(2))
    size = start.model.batch_size
    for number in range(STARTS):
        _run([take_samples(samples, number * size, size)], first, exact, eager, programs, one_step)
    losses = _run(make_batches(samples, size), first, exact, eager, programs, all_steps)
    sizes = {name: tensor.size for name, tensor in first.items()}
    parameters = [name for name, _ in start.model.build().named_parameters()]
    return {
        target: _compute_parity(target, one_step, all_steps, sizes, parameters, losses[target]) for target in programs
    }


def take_samples(samples: Samples, first: int, count: int) -> Samples:
    """Take consecutive samples."""
    rows = slice(first, first + count)
    return Samples(inputs=samples.inputs[rows], labels=samples.labels[rows], source=samples.source)


def make_batches(samples: Samples, batch_size: int) -> list[Samples]:
    """`STEPS` batches over two batches of samples, each seen several times; the last one is a quarter smaller."""
    batches = [take_samples(samples, step % 2 * batch_size, batch_size) for step in range(STEPS)]
    batches[-1] = take_samples(batches[-1], 0, max(1, batch_size - batch_size // 4))
    return batches


def _run(
    batches: Sequence[Samples],
    first: Weights,
    exact: Stepper,
    eager: Sequence[Stepper],
    programs: Mapping[str, Stepper],
    distances: _Distances,
) -> dict[str, list[float]]:
    """Take steps with every runner, and return each program's losses."""
    right, _ = _take_steps(exact, batches)
    distances.update.add(right, first)
    for stepper in eager:
        distances.eager.add(right, _take_steps(stepper, batches)[0])
    losses = {}
    for target, stepper in programs.items():
        weights, losses[target] = _take_steps(stepper, batches)
        distances.programs[target].add(right, weights)
    return losses


def _take_steps(stepper: Stepper, batches: Sequence[Samples]) -> tuple[Weights, list[float]]:
    stepper.begin()
    losses = [stepper.step(stepper.prepare(batch)) for batch in batches]
    return stepper.finish(), losses


def _compute_parity(
    target: str,
    one_step: _Distances,
    all_steps: _Distances,
    sizes: Mapping[str, int],
    parameters: Sequence[str],
    losses: Sequence[float],
) -> Parity:
    lengths, own_differences = one_step.measure_lengths(sizes, parameters), one_step.programs[target]

    def over_eager(name: str, distance: Callable[[Differences, Sequence[str]], float]) -> float:
        beyond = max(0.0, distance(own_differences, [name]) - FREE_DISTANCE * lengths[name])
        return _divide(beyond, distance(one_step.eager, [name]))

    worst = max(sizes, key=lambda name: over_eager(name, Differences.median))
    last = all_steps.programs[target]
    return Parity(
        one_step_over_eager=over_eager(worst, Differences.median),
        one_step_worst_tensor=worst,
        one_step_distance=own_differences.median([worst]) / lengths[worst],
        one_step_rms_over_eager=max(over_eager(name, Differences.rms) for name in sizes),
        distance_over_eager=_divide(last.rms(parameters), all_steps.eager.rms(parameters)),
        worst_tensor_over_eager=max(_divide(last.rms([name]), all_steps.eager.rms([name])) for name in sizes),
        eager_distance=all_steps.eager.rms(parameters) / all_steps.update.rms(parameters),
        max_abs_diff=own_differences.largest,
        eager_max_abs_diff=one_step.eager.largest,
        loss_fall=1 - float(np.mean(losses[-2:])) / float(np.mean(losses[:2])),
    )


def _divide(value: float, divisor: float) -> float:
    if value == 0:
        return 0.0
    return value / divisor if divisor > 0 else math.inf
