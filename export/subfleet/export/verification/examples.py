"""What a training program is verified on: a step in which everything that it computes can be seen.

Weights are random. What goes with them is not: a state that is large beside a gradient hides it, and so does a weight
whose change is lost in its rounding. So the untouched module takes a first step from states of zero; what is verified
is a step after it, on another batch, at a learning rate at which weights change about as much as they are large.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from subfleet.export.steps import Step

__all__ = ["first_step", "second_step", "seeded"]

_ANCHOR_DISTANCE = 1e-3
"""Of anchors from weights, as a share of them: what the proximal term adds is then about as large as a gradient."""


def seeded(text: str) -> torch.Generator:
    """A generator of random numbers that are the same for the same text."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))


def first_step(step: Step, generator: torch.Generator) -> dict[str, Tensor]:
    """What the untouched module leaves for the next step, in single precision, by the names of the step's inputs."""
    drawn = step.example(generator)
    given = {value.name: tensor for value, tensor in zip(step.inputs, drawn, strict=True)}
    for value in step.inputs:
        if value.role in {"optimiser_state", "gradient"}:
            given[value.name] = torch.zeros(value.shape)
        if value.role == "anchor":
            noise = torch.randn(value.shape, generator=generator)
            given[value.name] = given[f"parameter.{value.tensor}"] * (1 + _ANCHOR_DISTANCE * noise)
    if "apply" in given:
        summed = _after(step, given | {"apply": torch.zeros(())})
        given |= {name: tensor for name, tensor in summed.items() if name.startswith("gradient.")}
    after = _after(step, given)
    kept = {value.name: given[value.name] for value in step.inputs if value.role in _KEPT}
    kept |= {value.name: after[value.name] for value in step.inputs if value.role == "optimiser_state"}
    kept |= _spread({name: tensor for name, tensor in kept.items() if name.startswith("second_moment.")})
    return kept | {"learning_rate": given["learning_rate"] / _usual_change(step, given, after)}


_KEPT = frozenset({"parameter", "buffer", "anchor", "gradient"})
"""Roles of what is not learnt from the first step."""


def second_step(
    step: Step,
    kept: Mapping[str, Tensor],
    generator: torch.Generator,
    *,
    apply: bool = True,
    sample_count: int | None = None,
) -> tuple[Tensor, ...]:
    """A step's inputs after its `first_step`: on another batch.

    Args:
        step: the step.
        kept: what its first step left.
        generator: of the random numbers.
        apply: as in `Step.example`.
        sample_count: as in `Step.example`.
    """
    drawn = step.example(generator, apply=apply, sample_count=sample_count)
    return tuple(kept.get(value.name, tensor) for value, tensor in zip(step.inputs, drawn, strict=True))


def _after(step: Step, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is carried from the step to the next."""
    results = step.reference(*(given[value.name] for value in step.inputs))
    return {value.name.removeprefix("new."): result for value, result in zip(step.outputs, results, strict=True)}


def _spread(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adam's second moments as many batches leave them, where no element is 0.

    Adam divides by their roots. Of an element whose gradient is 0 but for rounding, it would learn that rounding.
    """
    if not moments:
        return {}
    least = _LEAST_MOMENT * float(torch.cat([tensor.flatten() for tensor in moments.values()]).mean())
    return {name: tensor + tensor.mean() + least for name, tensor in moments.items()}


_LEAST_MOMENT = 1e-2
"""Share of the mean of all second moments: of gradients a tenth of the usual ones."""


def _usual_change(step: Step, given: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """By which share of itself a parameter changes: midway between the least and the most, as factors go."""
    names = [value.name for value in step.inputs if value.role == "parameter"]
    shares = [float((after[name] - given[name]).norm() / given[name].norm()) for name in names]
    middle = statistics.median([share for share in shares if share] or [1.0])
    told = [share for share in shares if share > _VANISHING * middle] or [1.0]
    return math.sqrt(min(told) * max(told))


_VANISHING = 1e-6
"""A parameter that changes by this share of the usual has no gradient but rounding."""
