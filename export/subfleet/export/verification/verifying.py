"""Compares a program with the original module, on an example where everything that it computes is visible.

Weights are random, but the rest is not: a state that is large compared with a gradient hides it, and so does a weight
that changes by less than its rounding. So the original module takes a first step from states of zero; verified is a
second step on the same batch, from about the states that the first one left, with a learning rate at which weights
change by about their own size.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.verification.distances import EAGER_FACTOR, Distance, Run, Trial, list_failures
from subfleet.protocol.errors import ExportError

_ANCHOR_DISTANCE = 1e-3
"""Distance of anchors from weights, as a fraction: the proximal term is then about as large as a gradient."""


def seeded_generator(text: str) -> torch.Generator:
    """Return a generator of random numbers that are the same for the same text."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))


def second_step(
    step: Step, generator: torch.Generator, *, apply: bool = True, sample_count: int | None = None
) -> tuple[Tensor, ...]:
    """Return a step's inputs in the second step of a training, in single precision.

    Input gradients that are not summed are random, and the same in both steps.

    Args:
        step: of a module.
        generator: of the random numbers.
        apply: as in `Step.example`.
        sample_count: as in `Step.example`.
    """
    drawn = step.example(generator, sample_count=sample_count)
    given = {value.name: tensor for value, tensor in zip(step.inputs, drawn, strict=True)}
    zeroed = {"optimiser_state", "gradient"} if "apply" in given else {"optimiser_state"}
    for value in step.inputs:
        if value.role in zeroed:
            given[value.name] = torch.zeros(value.shape)
        if value.role == "anchor":
            noise = torch.randn(value.shape, generator=generator)
            given[value.name] = given[f"parameter.{value.tensor}"] * (1 + _ANCHOR_DISTANCE * noise)
    if "apply" in given:
        summed = _next_state(step, given | {"apply": torch.zeros(())})
        given |= _vary(step, summed, "gradient", generator)
    after = _next_state(step, given)
    given["learning_rate"] = given["learning_rate"] / _usual_change(step, given, after)
    given |= _vary(step, after, "optimiser_state", generator)
    given |= _spread_moments({name: tensor for name, tensor in given.items() if name.startswith("second_moment.")})
    if "apply" in given:
        given["apply"] = torch.tensor(float(apply))
    return tuple(given[value.name] for value in step.inputs)


def _next_state(step: Step, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is carried from the step to the next."""
    results = step.reference(*(given[value.name] for value in step.inputs))
    return {value.name.removeprefix("new."): result for value, result in zip(step.outputs, results, strict=True)}


def _vary(step: Step, after: Mapping[str, Tensor], role: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Multiply each element that a step has left by a random factor: of similar size, but in another direction."""
    values = [value for value in step.inputs if value.role == role]
    factors = {value.name: 0.5 + torch.rand(value.shape, generator=generator) for value in values if value.tensor}
    return {value.name: after[value.name] * factors.get(value.name, 1.0) for value in values}


def _spread_moments(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Raise Adam's second moments to what many batches leave, so that no element is 0.

    Adam divides by their roots. For an element with no gradient except rounding, it would learn that rounding.
    """
    if not moments:
        return {}
    least = _LEAST_MOMENT * float(torch.cat([tensor.flatten() for tensor in moments.values()]).mean())
    return {name: tensor + tensor.mean() + least for name, tensor in moments.items()}


_LEAST_MOMENT = 1e-2
"""Fraction of the mean of all second moments: of gradients a tenth of the usual ones."""


def _usual_change(step: Step, given: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the usual relative change of a parameter: the geometric mean of the smallest and the largest."""
    names = [value.name for value in step.inputs if value.role == "parameter"]
    shares = [float((after[name] - given[name]).norm() / given[name].norm()) for name in names]
    middle = statistics.median([share for share in shares if share] or [1.0])
    changing = [share for share in shares if share > _VANISHING * middle] or [1.0]
    return math.sqrt(min(changing) * max(changing))


_VANISHING = 1e-6
"""A parameter that changes by this fraction of the usual change has no gradient except rounding."""


_JUMP = 1e-2
"""A gradient may jump by this fraction of itself on a whole batch, in networks with so many activations that some input
always rounds to the other side of 0. Such a program must then pass in full on a few samples."""
_LARGEST_JUMP = 4e-2
"""The limit if PyTorch's own gradients jump by more than in a shallow network: less than half the error of a gradient
that is a tenth too large. Seen: 2.2 % in ResNet-101, where PyTorch's own were off by 0.5 %."""
FEW_SAMPLES = 2
ATTEMPTS = 4
_OTHER_BATCHES = 2


def _allowed_jump(distances: Sequence[Distance]) -> float:
    """Return the fraction of itself by which a gradient may jump, as PyTorch's own do."""
    shares = (
        distance.eager / distance.size
        for distance in distances
        if distance.jumps and distance.size and distance.is_seen
    )
    return min(max(_JUMP, EAGER_FACTOR * max(shares, default=0.0)), _LARGEST_JUMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The findings about a program that passed.

    Attributes:
        max_abs_diff: largest difference of any number where it passed in full, as a fraction of the largest number of
            its tensor if that is above 1.
        unseen: results of which single precision only shows rounding, on the whole batch: they only show that the
            program's result is as small as it should be.
    """

    max_abs_diff: float
    unseen: frozenset[str]


def verify_training(run: Run, step: Step, generator: torch.Generator) -> Verified:
    """Compare a training program with the original module in double precision.

    Raises:
        ExportError: a result differs by more than rounding and jumps explain, or shapes differ.
    """
    accumulates = any(value.role == "apply" for value in step.inputs)
    verified = [verify_trials(run, trials_of(step, generator, apply=apply)) for apply in {True, not accumulates}]
    unseen = frozenset[str].intersection(*(result.unseen for result in verified))  # without applying, nothing changes
    return Verified(max_abs_diff=max(result.max_abs_diff for result in verified), unseen=unseen)


def verify_inference(run: Run, step: Step, example: Sequence[Tensor]) -> float:
    """Compare a program without gradients with the original module; return the difference as in `Verified`.

    Raises:
        ExportError: a result differs by more than rounding explains, or shapes differ.
    """
    distances = Trial(step, example).measure(run)
    _check_distances(distances)
    return _largest(distances)


def verify_evaluation(run: Run, step: Step, generator: torch.Generator) -> float:
    """Compare an evaluation program with the original module, on a whole batch and on few samples.

    Returns:
        The difference as in `Verified`.

    Raises:
        ExportError: a result differs by more than rounding explains, or shapes differ.
    """
    counts = (None, FEW_SAMPLES)
    return max(verify_inference(run, step, step.example(generator, sample_count=count)) for count in counts)


def trials_of(step: Step, generator: torch.Generator, *, apply: bool = True) -> Iterator[Trial]:
    """Yield a whole batch, then a few samples at a time, then other batches."""
    for sample_count in (None, *[FEW_SAMPLES] * ATTEMPTS, *[None] * _OTHER_BATCHES):
        example = second_step(step, generator, apply=apply, sample_count=sample_count)
        yield Trial(step, example, is_whole=sample_count is None)


def verify_trials(run: Run, trials: Iterable[Trial]) -> Verified:
    """Check that a program passes one trial in full, and at least one of a whole batch except for jumps.

    If a gradient has jumped by more than PyTorch's own do, but by no more than any may, another batch must confirm that
    it was a jump: an error shows on every batch. If the rounding of a single number is above its limit by chance, the
    program must pass in full where that number is more than rounding.

    Raises:
        ExportError: it does not.
    """
    passed, first, last = list[Sequence[Distance]](), list[Distance](), list[Distance]()
    doubted: frozenset[str] | None = None
    for trial in trials:
        last = trial.measure(run)
        if not list_failures(last):
            passed.append(last)
        if trial.is_whole:
            _check_distances([distance for distance in last if not distance.may_be_chance], _LARGEST_JUMP)
            far = list_failures(last, _allowed_jump(last))
            if doubted is None and all(distance.may_be_chance for distance in far):
                doubted = frozenset(distance.name for distance in far)
            first = first or last
        clear = (own for own in passed if doubted is not None and doubted <= _list_seen(own))
        if (found := next(clear, None)) is not None:
            unseen = frozenset(distance.name for distance in first) - _list_seen(first)
            return Verified(max_abs_diff=_largest(found), unseen=unseen)
    near = doubted is not None
    _check_distances(last if near else first, 0.0 if near else _allowed_jump(first))
    _check_distances([distance for distance in first if distance.name in (doubted or ())])
    raise ExportError("no run of the program could be compared; report it with the request")


def _list_seen(distances: Iterable[Distance]) -> frozenset[str]:
    return frozenset(distance.name for distance in distances if distance.is_seen)


def _check_distances(distances: Sequence[Distance], jump: float = 0.0) -> None:
    """Check that every result of a trial is within its limit.

    Args:
        distances: of the results.
        jump: fraction of itself by which a gradient may jump.

    Raises:
        ExportError: a value is NaN or infinite in PyTorch, or off by more than its limit.
    """
    failures = list_failures(distances, jump)
    lost = next((distance for distance in failures if math.isnan(distance.size)), None)
    if lost is not None:
        raise ExportError(
            f"the network's own {lost.name!r} is NaN or infinite in PyTorch, on random weights and inputs of about "
            "1, so no program of it can be verified; keep roots, powers, logarithms and divisions away from 0 and "
            "below"
        )
    if failures:
        # A clipped gradient changes the others: report the worst one.
        worst = max(failures, key=_excess)
        raise ExportError(
            f"the program's {worst.name!r} is off by {worst.own:.1e} of {worst.size:.1e}, but at most "
            f"{worst.limit:.1e} is allowed (PyTorch in single precision is off by {worst.eager:.1e}); nothing was "
            "written, report it with the request"
        )


def _excess(distance: Distance) -> float:
    """Return the error as a multiple of the limit; NaN is the largest."""
    return math.inf if math.isnan(distance.own) or not distance.limit else distance.own / distance.limit


def _largest(distances: Sequence[Distance]) -> float:
    return max((distance.largest for distance in distances), default=0.0)
