"""A program held against the untouched module."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.verification.distances import EAGER_FACTOR, Distance, Exact
from subfleet.export.verification.examples import second_step
from subfleet.protocol.errors import ExportError

__all__ = [
    "Run",
    "Trial",
    "TrialResult",
    "Verified",
    "trials_of",
    "verify_evaluation",
    "verify_inference",
    "verify_training",
    "verify_trials",
]

_JUMP = 1e-2
"""A gradient may jump by this fraction of itself on a whole batch, in networks of so many activations that one or
another always rounds to the other side of 0. Such a program must then pass in full on a few samples."""
_LARGEST_JUMP = 4e-2
"""At most, where PyTorch's own gradients jump by more than a shallow network's do: less than half of what a gradient is
off by that is a tenth too large. Seen: 2.2 % in ResNet-101, where PyTorch's own were off by 0.5 %."""
_FEW_SAMPLES = 2
_ATTEMPTS = 4
_OTHER_BATCHES = 2

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A program: one tensor for each of the step's inputs, to one for each of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a program is given, and what must come of it."""

    example: tuple[Tensor, ...]
    exact: Exact
    is_whole: bool = True

    def run(self, run: Run) -> "TrialResult":
        """How far each result of a program is off; where it is too far, beside more of PyTorch's own roundings."""
        results = run(self.example)
        outcome = TrialResult(distances=self.exact.distances(results))
        if not outcome.passes and self.exact.add_references():
            outcome = TrialResult(distances=self.exact.distances(results))
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What came of a trial."""

    distances: Sequence[Distance]

    @property
    def passes(self) -> bool:
        """Whether every result is near enough."""
        return not self.failures()

    @property
    def jump(self) -> float:
        """By which fraction of itself a gradient may jump, as PyTorch's own do."""
        shares = (
            distance.eager / distance.size
            for distance in self.distances
            if distance.jumps and distance.size and distance.is_seen
        )
        return min(max(_JUMP, EAGER_FACTOR * max(shares, default=0.0)), _LARGEST_JUMP)

    def failures(self, jump: float = 0.0) -> list[Distance]:
        """The results that are not."""
        return [distance for distance in self.distances if not distance.passes(jump)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found of a program that passed.

    Attributes:
        max_abs_diff: largest difference of any number where it passed in full, as a fraction of the largest number of
            its tensor where that is above 1.
        unseen: results of which single precision shows nothing but rounding, on the whole batch: nobody can tell from
            them what the program computes, only that it is as small as it should be.
    """

    max_abs_diff: float
    unseen: frozenset[str]


def verify_training(run: Run, step: Step, generator: torch.Generator) -> Verified:
    """Run a training program beside the untouched module in double precision.

    Raises:
        ExportError: a result differs by more than rounding and its jumps explain, or shapes differ.
    """
    accumulates = any(value.role == "apply" for value in step.inputs)
    verified = [verify_trials(run, trials_of(step, generator, apply=apply)) for apply in {True, not accumulates}]
    unseen = frozenset[str].intersection(
        *(result.unseen for result in verified)
    )  # where nothing is applied, nothing changes
    return Verified(max_abs_diff=max(result.max_abs_diff for result in verified), unseen=unseen)


def verify_inference(run: Run, step: Step, example: Sequence[Tensor]) -> float:
    """Run a program without gradients beside the untouched module in double precision; the difference as in `Verified`.

    Raises:
        ExportError: a result differs by more than rounding explains, or shapes differ.
    """
    result = Trial(example=tuple(example), exact=Exact(step, example)).run(run)
    check_result(result)
    return _largest(result.distances)


def verify_evaluation(run: Run, step: Step, generator: torch.Generator) -> float:
    """Run an evaluation program beside the untouched module in double precision, on a whole batch and on few samples.

    Returns:
        The difference as in `Verified`.

    Raises:
        ExportError: a result differs by more than rounding explains, or shapes differ.
    """
    counts = (None, _FEW_SAMPLES)
    return max(verify_inference(run, step, step.example(generator, sample_count=count)) for count in counts)


def trials_of(step: Step, generator: torch.Generator, *, apply: bool = True) -> Iterator[Trial]:
    """A whole batch, then a few samples at a time, then other batches."""
    for sample_count in (None, *[_FEW_SAMPLES] * _ATTEMPTS, *[None] * _OTHER_BATCHES):
        example = second_step(step, generator, apply=apply, sample_count=sample_count)
        yield Trial(example=example, exact=Exact(step, example), is_whole=sample_count is None)


def verify_trials(run: Run, trials: Iterable[Trial]) -> Verified:
    """Whether a program passes one of the trials in full, and one of a whole batch at least but for jumps.

    Where a gradient has jumped by more than PyTorch's own do, though by no more than any may, another batch must show
    that it was a jump: what is wrong is so on every batch.

    Raises:
        ExportError: it does not.
    """
    unseen: frozenset[str] | None = None
    passed, is_near, first, last = None, False, TrialResult(distances=()), TrialResult(distances=())
    for trial in trials:
        last = trial.run(run)
        passed = passed or (last if last.passes else None)
        if trial.is_whole:
            unseen = (
                frozenset(distance.name for distance in last.distances if not distance.is_seen)
                if unseen is None
                else unseen
            )
            check_result(last, _LARGEST_JUMP)
            is_near = is_near or not last.failures(last.jump)
            first = first if first.distances else last
        if is_near and passed is not None:
            return Verified(max_abs_diff=_largest(passed.distances), unseen=unseen or frozenset())
    check_result(last if is_near else first, 0.0 if is_near else first.jump)
    raise ExportError("the program was compared with nothing; report it with the request")


def check_result(result: TrialResult, jump: float = 0.0) -> None:
    failures = result.failures(jump)
    lost = next((distance for distance in failures if math.isnan(distance.size)), None)
    if lost is not None:
        raise ExportError(
            f"the network's own {lost.name!r} is NaN or infinite in PyTorch, on random weights and inputs of about "
            "1, so that no program of it can be verified; keep roots, powers, logarithms and divisions away from 0 and "
            "below"
        )
    if failures:
        # A clipped gradient changes what is made of the others: the worst is where to look.
        worst = max(failures, key=_excess)
        raise ExportError(
            f"the program's {worst.name!r} is off by {worst.own:.1e} of {worst.size:.1e}, but may be by "
            f"{worst.limit:.1e} at most, as PyTorch's single precision is by {worst.eager:.1e}; nothing was "
            "written, report it with the request"
        )


def _excess(distance: Distance) -> float:
    """How many times as far off as it may be; NaN is the farthest."""
    return math.inf if math.isnan(distance.own) or not distance.limit else distance.own / distance.limit


def _largest(distances: Sequence[Distance]) -> float:
    return max((distance.largest for distance in distances), default=0.0)
