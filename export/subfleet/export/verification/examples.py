"""The example on which a training program is verified: a step in which everything that it computes is visible.

Weights are random, but the rest is not: a state that is large compared with a gradient hides it, and so does a weight
that changes by less than its rounding. So the original module takes a first step from states of zero; verified is a
second step on the same batch, from about the states that the first one left, with a learning rate at which weights
change by about their own size.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from subfleet.export.steps import Step

__all__ = ["second_step", "seeded_generator"]

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
