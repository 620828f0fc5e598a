"""Writes the programs of pieces for a target, and verifies them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.targets import find_target
from subfleet.export.targets.base import WrittenProgram
from subfleet.export.targets.torch import TARGET as TORCH
from subfleet.export.targets.torch import plan_torch
from subfleet.export.tools import as_export_errors
from subfleet.export.tracing import trace
from subfleet.export.verification.distances import Run, Trial
from subfleet.export.verification.verifying import (
    ATTEMPTS,
    FEW_SAMPLES,
    second_step,
    seeded_generator,
    verify_evaluation,
    verify_inference,
    verify_trials,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenStep:
    """A program of a piece.

    Attributes:
        step: the step that it computes.
        program: its bytes, empty for PyTorch, and its own memory.
        max_abs_diff: as in `subfleet.export.verification.verifying.Verified`.
    """

    step: Step
    program: WrittenProgram
    max_abs_diff: float


def write_step(step: Step, kind: str, *, target: str, seed: str) -> WrittenStep:
    """Write one program of a piece, and verify it.

    Args:
        step: the step to write.
        kind: kind of step; see `subfleet.protocol.chains`.
        target: "onnx", "executorch" or "torch".
        seed: seed of the verification's numbers.

    Raises:
        ExportError: an operator cannot be written, or the program differs from PyTorch.
    """
    with as_export_errors():
        program, run = _write(step, kind, target)
        return WrittenStep(step=step, program=program, max_abs_diff=_difference(run, step, kind, seed))


def _write(step: Step, kind: str, target: str) -> tuple[WrittenProgram, Run]:
    if target == TORCH:
        memory = plan_torch(step, trace(step, {}))
        return WrittenProgram(body=b"", memory=memory, operators=()), lambda example: step.run(*example)
    writer = find_target(target)
    lowerings = writer.inference_lowerings if kind in ("forward", "evaluate") else writer.lowerings
    written = writer.write_training(trace(step, lowerings), step)
    names = [value.name for value in step.inputs]
    return written, lambda example: writer.run(written.body, dict(zip(names, example, strict=True)))


def _difference(run: Run, step: Step, kind: str, seed: str) -> float:
    """Return the difference from the original module in double precision; raise ExportError if it is too large."""
    generator = seeded_generator(seed)
    if kind == "evaluate":
        return verify_evaluation(run, step, generator)
    if kind == "update":
        return verify_trials(run, [Trial(step, second_step(step, generator))]).max_abs_diff
    if not any(value.role == "sample_mask" for value in step.inputs):
        return verify_inference(run, step, step.example(generator))
    counts = (None, *[FEW_SAMPLES] * ATTEMPTS)
    examples = ((count, _mask_padding_gradient(step, step.example(generator, sample_count=count))) for count in counts)
    trials = (Trial(step, example, is_whole=count is None) for count, example in examples)
    return verify_trials(lambda example: _mask_padding(step, example, run(example)), trials).max_abs_diff


def _mask_padding_gradient(step: Step, example: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Set the gradients of padding to 0, since no loss depends on padding."""
    real_B = _real(step, example)  # noqa: N806 - shapes in names
    return tuple(
        _zero_padding(tensor, real_B) if value.role == "features_gradient" else tensor
        for value, tensor in zip(step.inputs, example, strict=True)
    )


def _mask_padding(step: Step, example: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Set a link's outputs for padding to 0, since they are not read."""
    real_B = _real(step, example)  # noqa: N806 - shapes in names
    return tuple(
        _zero_padding(tensor, real_B) if value.role == "features" else tensor
        for value, tensor in zip(step.outputs, results, strict=True)
    )


def _real(step: Step, example: Sequence[Tensor]) -> Tensor:
    return next(t for value, t in zip(step.inputs, example, strict=True) if value.role == "sample_mask") > 0


def _zero_padding(tensor: Tensor, real_B: Tensor) -> Tensor:  # noqa: N803 - shapes in names
    zeroed = tensor.clone()
    zeroed[~real_B] = 0.0
    return zeroed
