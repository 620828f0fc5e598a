"""Tolerances between a program and the unchanged module, and the examples used to verify it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from export.export_cases import FULL_SGD, train_request
from export.export_cases import step_of as step_of_request
from torch import Tensor, nn

from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, Step, inference_step, training_step
from subfleet.export.verification.distances import Distance, Run, Trial
from subfleet.export.verification.verifying import (
    second_step,
    trials_of,
    verify_inference,
    verify_training,
    verify_trials,
)
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(size: int, batch_size: int) -> Step:
    return training_step(
        nn.Linear(size, size),
        SampleSpec(shape=(size,)),
        batch_size=batch_size,
        objective=ObjectiveSettings(),
        optimiser=FULL_SGD,
    )


def run_with_change(step: Step, name: str, change: Callable[[Tensor], Tensor], *, from_samples: int = 1) -> Run:
    """A runtime that changes one result of examples with at least `from_samples` real samples."""
    outputs, inputs = [value.name for value in step.outputs], [value.name for value in step.inputs]

    def run(example: Sequence[Tensor]) -> list[Tensor]:
        results = list(step.run(*example))
        if example[inputs.index("sample_mask")].sum() >= from_samples:
            results[outputs.index(name)] = change(results[outputs.index(name)])
        return results

    return run


class Measured(Trial):
    """A trial of a whole batch, or of a few samples, that finds a gradient off by this much."""

    def __init__(self, own: float, *, is_number: bool, is_whole: bool, size: float = 1.0) -> None:
        self.is_whole = is_whole
        known = {"name": "gain", "jumps": True, "size": size, "usual": 1.0, "eager": 0.08}
        self._found = Distance(is_number=is_number, own=own, largest=own, **known)  # type: ignore[arg-type]

    def measure(self, run: Run) -> list[Distance]:
        return [self._found]


@pytest.mark.parametrize(
    ("is_number", "whole", "few", "passes"),
    [
        (True, 0.2, 0.05, True),  # rounding: PyTorch's own is 0.08, and that of one number differs by chance
        (False, 0.2, 0.05, False),  # that of many numbers does not
        (True, 0.2, 0.2, False),  # a defect: never right
        (True, 0.7, 0.05, False),  # too far off for rounding
    ],
)
def test_a_number_with_much_rounding_must_be_right_in_another_trial(
    is_number: bool, whole: float, few: float, passes: bool
) -> None:
    owns = ((whole, True), (few, False), (whole, True))
    trials = [Measured(own, is_number=is_number, is_whole=is_whole) for own, is_whole in owns]
    if passes:
        assert verify_trials(lambda example: example, trials).max_abs_diff == few
        return
    with pytest.raises(ExportError, match="'gain' is off by"):
        verify_trials(lambda example: example, trials)


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_trial_where_a_number_is_rounding_alone_proves_nothing(*, is_seen: bool) -> None:
    """An error of a fifth hides in twice as much rounding."""
    trials = [Measured(0.2, is_number=True, is_whole=True)]
    trials += [Measured(0.2 * size, is_number=True, is_whole=False, size=size) for size in (0.1, 0.5)]
    if is_seen:
        trials += [Measured(0.01, is_number=True, is_whole=False)]
        verify_trials(lambda example: example, trials)
        return
    with pytest.raises(ExportError, match="'gain' is off by"):
        verify_trials(lambda example: example, trials)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [2e-2, math.nan, math.inf])
def test_a_program_that_differs_is_an_error(fault: float) -> None:
    step = step_of_request(train_request("onnx"))
    assert verify_training(lambda example: step.run(*example), step, seeded()).max_abs_diff <= 1e-5
    trials = list(trials_of(step, seeded()))
    for value in step.outputs[3:]:
        with pytest.raises(ExportError, match=rf"'{value.name}' is off by .* but at most"):
            verify_trials(run_with_change(step, value.name, lambda tensor: tensor + fault), trials)


def test_results_of_another_number_or_shape_are_errors() -> None:
    step = linear(3, 2)
    with pytest.raises(ExportError, match="gives 4 results, but must give 7"):
        verify_training(lambda example: step.run(*example)[:4], step, seeded())
    with pytest.raises(ExportError, match=r"'new.parameter.weight' is \(1, 3, 3\), but must be \(3, 3\)"):
        verify_training(run_with_change(step, "new.parameter.weight", lambda tensor: tensor[None]), step, seeded())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "from_samples", "passes"),
    [
        (1e-3, 3, True),  # a jump: a little off on the whole batch, and right on a few samples
        (1e-3, 1, False),  # a defect: never right
        (2e-2, 3, False),  # too far off for a jump
    ],
)
def test_a_program_with_jumps_must_be_right_on_a_few_samples(share: float, from_samples: int, passes: bool) -> None:
    step = linear(30, 8)
    run = run_with_change(step, "new.momentum.weight", lambda tensor: tensor * (1 + share), from_samples=from_samples)
    if passes:
        assert verify_training(run, step, seeded()).max_abs_diff <= 1e-5
        return
    with pytest.raises(ExportError, match=r"'new\.momentum\.weight' is off by"):
        verify_training(run, step, seeded())


@pytest.mark.parametrize(("batches", "passes"), [(1, True), (9, False)])
def test_a_larger_jump_must_be_gone_on_another_batch(batches: int, passes: bool) -> None:
    """An activation that rounds to the other side of 0 changes one batch a little; a defect changes every batch."""
    step, seen = linear(16, 8), list[int]()

    def run(example: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = example[[value.name for value in step.inputs].index("sample_mask")].sum() > 2
        if whole:
            seen.append(1)
        share = 0.01 if whole and len(seen) <= batches else 0.0
        return run_with_change(step, "new.momentum.weight", lambda tensor: tensor * (1 + share))(example)

    if passes:
        verify_training(run, step, seeded())
        return
    with pytest.raises(ExportError, match=r"momentum\.weight' is off by"):
        verify_training(run, step, seeded())


@pytest.mark.slow
def test_unused_parameters_keep_their_bits() -> None:
    module = nn.Linear(4, 3)
    module.register_parameter("unused", nn.Parameter(torch.ones(5)))
    step = training_step(
        module, SampleSpec(shape=(4,)), batch_size=3, objective=ObjectiveSettings(), optimiser=FULL_SGD
    )
    verify_training(lambda example: step.run(*example), step, seeded())
    with pytest.raises(ExportError, match=r"'new\.parameter\.unused'"):
        verify_training(
            run_with_change(step, "new.parameter.unused", lambda tensor: tensor * (1 + 1e-4)), step, seeded()
        )


def test_a_model_that_differs_is_an_error() -> None:
    step = inference_step(nn.Linear(4, 3), SampleSpec(shape=(4,)), batch_size=2)
    example = step.example(seeded())
    assert verify_inference(lambda inputs: step.run(*inputs), step, example) <= 1e-6
    with pytest.raises(ExportError, match="'logits' is off by"):
        verify_inference(lambda inputs: [logits * 1.001 for logits in step.run(*inputs)], step, example)


@pytest.mark.parametrize(
    "optimiser",
    [
        OptimiserSettings(momentum=0.0, weight_decay=0.1),
        OptimiserSettings(dampening=0.3),
        OptimiserSettings(name="adam"),
        OptimiserSettings(name="adamw", weight_decay=0.1),
    ],
    ids=lambda settings: f"{settings.name} {settings.dampening}",
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_everything_that_is_carried_shows_in_an_example(optimiser: OptimiserSettings, *, accumulate: bool) -> None:
    """States and gradients have similar sizes, and the change of every weight is visible in the weight."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    step = training_step(
        module,
        SampleSpec(shape=(6,)),
        batch_size=4,
        objective=ObjectiveSettings(proximal=True),
        optimiser=optimiser,
        accumulate=accumulate,
    )
    generator = seeded()
    example = second_step(step, generator)
    inputs = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    new = {
        value.name.removeprefix("new."): tensor
        for value, tensor in zip(step.outputs, step.reference(*example), strict=True)
    }
    for name, tensor in inputs.items():
        kind = name.partition(".")[0]
        if kind in {"parameter", "momentum", "first_moment"}:
            assert 1e-3 < float((new[name] - tensor).norm() / tensor.norm()) < 1e3, name
        if kind == "second_moment":
            assert bool((tensor > 0).all()), name
        if kind == "anchor":
            assert 0 < float((inputs[f"parameter.{name[7:]}"] - tensor).norm() / tensor.norm()) < 0.01, name
    if "started" in inputs:
        assert inputs["started"] == 1.0
    if "first_correction" in inputs:
        torch.testing.assert_close(inputs["first_correction"], torch.tensor(1 - optimiser.beta1))


@pytest.mark.slow
def test_results_that_single_precision_cannot_verify_are_reported() -> None:
    """A bias before a norm has no gradient; what a program computes for it cannot be told from rounding."""
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
    plain = OptimiserSettings(momentum=0.0)
    step = training_step(module, SampleSpec(shape=(6,)), batch_size=6, objective=ObjectiveSettings(), optimiser=plain)
    verified = verify_training(lambda example: step.run(*example), step, seeded())
    assert verified.unseen == {"new.parameter.0.bias"}
    name = "new.parameter.0.bias"
    with pytest.raises(ExportError, match=name):
        verify_training(run_with_change(step, name, lambda tensor: tensor + 1e-2), step, seeded())


class Shift(nn.Module):
    """Adds one number per channel, which a norm after it removes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@pytest.mark.slow
def test_many_results_of_pure_rounding_hide_no_other() -> None:
    """The report also lists the results that could not be verified."""
    parts: list[nn.Module] = []
    for before in (2, 4, 4):
        parts += [nn.Conv2d(before, 4, 3, padding=1), Shift(4), nn.InstanceNorm2d(4), nn.Tanh()]
    module = nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * 36, 3))
    settings = {"objective": ObjectiveSettings(), "optimiser": OptimiserSettings()}
    step = training_step(module, SampleSpec(shape=(2, 6, 6)), batch_size=4, **settings)  # type: ignore[arg-type]
    unseen = verify_training(lambda example: step.run(*example), step, seeded()).unseen
    seen = [value for value in step.outputs if value.role == "optimiser_state" and value.name not in unseen]
    assert {value.tensor for value in seen} >= {"0.weight", "4.weight", "8.weight", "13.weight"}
    assert len(unseen) > len(step.outputs) / 2 - 4
    for value in seen:
        with pytest.raises(ExportError, match=rf"'{re.escape(value.name)}' is off by"):
            verify_training(run_with_change(step, value.name, lambda tensor: 1.1 * tensor), step, seeded())


@pytest.mark.export
def test_a_network_with_few_verifiable_parameters_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    norms = [part for _ in range(3) for part in (Shift(2), nn.InstanceNorm2d(2))]
    module = nn.Sequential(nn.Conv2d(2, 2, 3), *norms, nn.Tanh(), nn.Flatten(), nn.Linear(2 * 16, 3))
    settings = {"objective": ObjectiveSettings(), "optimiser": OptimiserSettings()}
    step = training_step(module, SampleSpec(shape=(2, 6, 6)), batch_size=4, **settings)  # type: ignore[arg-type]
    write_program(step, target="onnx", program_id="shifted")
    assert "4 of 7 parameters could not be verified" in caplog.text


def test_the_step_itself_is_no_witness() -> None:
    """A step that is already wrong in PyTorch is caught, since the reference does not use it."""
    step = linear(5, 4)
    negated = run_with_change(step, "new.momentum.weight", lambda tensor: -tensor)
    wrong = replace(step, run=lambda *tensors: tuple(negated(tensors)))
    with pytest.raises(ExportError, match=r"'new\.momentum\.weight'"):
        verify_training(lambda example: wrong.run(*example), wrong, seeded())
