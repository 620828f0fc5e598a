"""Whether a written program computes what PyTorch computes in double precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.targets.base import Target
from subfleet.protocol.errors import ExportError

__all__ = ["TOLERANCE", "largest_difference", "verify", "verify_training"]

TOLERANCE = 1e-4
"""The largest absolute difference from PyTorch in double precision that a program may show on random inputs."""
_EAGER_FACTOR = 4.0
"""Where PyTorch's own single precision is further off, a program may be this many times as far as that."""
_JUMPING = frozenset({"parameter", "optimiser_state", "gradient"})
"""Roles of values that follow a gradient. It jumps where an activation's input rounds to the other side of 0, which
moves a few elements of a large tensor; so these may also pass by their relative distance as a whole, at `TOLERANCE`."""
_JUMP_TOLERANCE = 1e-2
"""Of that distance on a whole batch, in networks of so many activations that one or another always jumps. Such a
program must then pass in full on a few samples."""
_FEW_SAMPLES = 2
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """How far one result is from PyTorch's: its largest absolute difference, what that may be, and as a whole."""

    name: str
    jumps: bool
    absolute: float
    limit: float
    relative: float

    def passes(self, jump_tolerance: float) -> bool:
        """Written so that NaN fails."""
        return self.absolute <= self.limit or (self.jumps and self.relative <= jump_tolerance)


def verify_training(target: Target, body: bytes, step: Step, generator: torch.Generator) -> float:
    """Run a training program beside PyTorch in double precision; the largest absolute difference where it must pass.

    Raises:
        ExportError: a result differs by more than rounding and its jumps explain, or shapes differ.
    """
    accumulates = any(value.role == "apply" for value in step.inputs)
    return max(_verify_call(target, body, step, generator, apply=apply) for apply in {True, not accumulates})


def _verify_call(target: Target, body: bytes, step: Step, generator: torch.Generator, *, apply: bool) -> float:
    example = step.example(generator, apply=apply)
    found = _differences(step, example, _run(target, body, step, example))
    if all(difference.passes(TOLERANCE) for difference in found):
        return _worst(found)
    _check(found, _JUMP_TOLERANCE)
    for _ in range(_ATTEMPTS):
        example = step.example(generator, apply=apply, sample_count=_FEW_SAMPLES)
        found = _differences(step, example, _run(target, body, step, example))
        if all(difference.passes(TOLERANCE) for difference in found):
            return _worst(found)
    _check(found, TOLERANCE)
    return _worst(found)


def verify(target: Target, body: bytes, step: Step, example: Sequence[Tensor]) -> float:
    """Run a program once beside PyTorch in double precision; the largest absolute difference.

    Raises:
        ExportError: it is above `TOLERANCE`, and above what PyTorch's own single precision explains; or shapes differ.
    """
    return largest_difference(step, example, _run(target, body, step, example))


def largest_difference(step: Step, example: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Compare a program's results with PyTorch's; see `verify`."""
    found = _differences(step, example, actual)
    _check(found, TOLERANCE)
    return _worst(found)


def _run(target: Target, body: bytes, step: Step, example: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return target.run(body, {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)})


def _differences(step: Step, example: Sequence[Tensor], actual: Sequence[Tensor]) -> list[_Difference]:
    exact = step.run(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in example))
    if len(exact) != len(actual):
        raise ExportError(f"the program gives {len(actual)} results, but must give {len(exact)}")
    found = []
    for value, right, eager, got in zip(step.outputs, exact, step.run(*example), actual, strict=True):
        if right.shape != got.shape:
            raise ExportError(f"the program's {value.name!r} is {tuple(got.shape)}, but must be {tuple(right.shape)}")
        found.append(
            _Difference(
                name=value.name,
                jumps=value.role in _JUMPING,
                absolute=_distance(right, got),
                limit=max(TOLERANCE, _EAGER_FACTOR * _distance(right, eager)),
                relative=float((right - got).norm() / right.norm()),
            )
        )
    return found


def _check(found: Sequence[_Difference], jump_tolerance: float) -> None:
    for difference in found:
        if not difference.passes(jump_tolerance):
            raise ExportError(
                f"the program's {difference.name!r} differs from PyTorch by {difference.absolute:.1e}, but may by "
                f"{difference.limit:.0e} at most; nothing was written, report it with the request"
            )


def _worst(found: Sequence[_Difference]) -> float:
    return max((difference.absolute for difference in found), default=0.0)


def _distance(right: Tensor, other: Tensor) -> float:
    return float((right - other).abs().max()) if right.numel() else 0.0
