"""What cannot be exported is named: the operator, the layer, the value, and what to do."""

import math
from collections.abc import Mapping

import pytest
import torch
from export.export_cases import FULL_SGD, MLP, PLAIN, largest, step_of, train_request
from torch import Tensor, nn

from subfleet.export.programs import export_training_program
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.targets import TARGETS, target_named
from subfleet.export.tracing import trace
from subfleet.export.verification import TOLERANCE, verify, verify_training
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings


class Wrong:
    """A runtime that adds a fault to the first element of one of the step's results, or to all of it."""

    def __init__(self, step: Step, fault: float, *, result: int = -1, whole: bool = True) -> None:
        self.step, self.fault, self.result, self.whole = step, fault, result, whole

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        assert body == b"body"
        results = self.step.run(*inputs.values())
        flat = results[self.result].view(-1)
        flat[: None if self.whole else 1] += self.fault
        return results


@pytest.mark.parametrize("fault", [2e-4, math.nan, math.inf])
def test_a_program_that_differs_from_pytorch_is_an_error(fault: float) -> None:
    step = step_of(train_request("onnx"))
    example = step.example(torch.Generator().manual_seed(0))
    assert verify(Wrong(step, 0.0), b"body", step, example) <= 1e-5  # type: ignore[arg-type] # a part of a target
    with pytest.raises(ExportError, match=r"'new\.momentum\..*' differs from PyTorch by .* but may by 1e-04"):
        verify(Wrong(step, fault), b"body", step, example)  # type: ignore[arg-type] # a part of a target


def test_a_jump_of_one_element_of_a_gradient_is_no_difference() -> None:
    """An activation's input on the other side of 0 moves a few elements; a defect moves the whole tensor."""

    step = training_step(
        nn.Linear(300, 300), SampleSpec(shape=(300,)), batch_size=2, objective=ObjectiveSettings(), optimiser=FULL_SGD
    )
    example = step.example(torch.Generator().manual_seed(0))
    names = [value.name for value in step.outputs]
    assert names[-2] == "new.momentum.weight"
    small, large = (Wrong(step, fault, result=-2, whole=False) for fault in (0.001, 1.0))
    assert verify(small, b"body", step, example) > TOLERANCE  # type: ignore[arg-type] # a part of a target
    with pytest.raises(ExportError, match="differs from PyTorch"):
        verify(large, b"body", step, example)  # type: ignore[arg-type] # a part of a target


class WrongOnBatchesOf:
    """A runtime whose gradients are off by a share of themselves where so many samples or more are real."""

    def __init__(self, step: Step, share: float, sample_count: int) -> None:
        self.step, self.share, self.sample_count = step, share, sample_count

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        results = self.step.run(*inputs.values())
        if inputs["sample_mask"].sum() < self.sample_count:
            return results
        place = [value.name for value in self.step.outputs].index("new.momentum.weight")
        return (*results[:place], results[place] * (1 + self.share), *results[place + 1 :])


@pytest.mark.parametrize(
    ("share", "sample_count", "passes"),
    [
        (1e-3, 3, True),  # a jump: a little off on the whole batch, and right on a few samples
        (1e-3, 1, False),  # a defect: never right
        (2e-2, 3, False),  # too far off on the whole batch for any jump
    ],
)
def test_a_program_with_jumps_must_be_right_on_a_few_samples(share: float, sample_count: int, passes: bool) -> None:
    step = training_step(
        nn.Linear(30, 30), SampleSpec(shape=(30,)), batch_size=8, objective=ObjectiveSettings(), optimiser=FULL_SGD
    )
    runtime = WrongOnBatchesOf(step, share, sample_count)
    generator = torch.Generator().manual_seed(0)
    if passes:
        assert verify_training(runtime, b"", step, generator) <= TOLERANCE  # type: ignore[arg-type] # a part of a target
        return
    with pytest.raises(ExportError, match=r"'new\.momentum\.weight' differs from PyTorch"):
        verify_training(runtime, b"", step, generator)  # type: ignore[arg-type] # a part of a target


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_defect_in_a_lowering_is_found(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dict(TARGETS[target].lowerings)
    broken[torch.ops.aten.threshold_backward.default] = lambda gradient, output, threshold: gradient
    monkeypatch.setattr(type(TARGETS[target]), "lowerings", broken)
    with pytest.raises(ExportError, match="differs from PyTorch"):
        export_training_program(train_request(target))


def step_through(layer: nn.Module) -> Step:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), layer, nn.Linear(4, 2))
    return training_step(module, SampleSpec(shape=(6,)), batch_size=2, objective=ObjectiveSettings(), optimiser=PLAIN)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_an_operator_without_translation_is_named(target: str) -> None:
    class Unusual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            curved: Tensor = torch.special.bessel_j0(x).detach() * x
            return curved

    made = step_through(Unusual())
    graph = trace(made, TARGETS[target].lowerings)
    with pytest.raises(ExportError, match=r"the operator aten\.\w+.* \(node '.*', giving \(2, 4\)\).*lowering"):
        TARGETS[target].write_training(graph, made)


def test_a_layer_that_depends_on_values_is_refused() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(ExportError, match=r"cannot be traced.*shapes do not depend on values"):
        trace(step_through(Choosing()), TARGETS["onnx"].lowerings)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ExportError, match=r"'tflite', but must be one of \['executorch', 'onnx'\]"):
        target_named("tflite")
    with pytest.raises(ExportError, match="'tflite'"):
        _ = train_request("tflite").program_id
    with pytest.raises(ExportError, match="objective is 'hinge'"):
        training_step(
            nn.Linear(2, 2),
            SampleSpec(shape=(2,)),
            batch_size=1,
            objective=ObjectiveSettings(name="hinge"),  # type: ignore[arg-type]
            optimiser=FULL_SGD,
        )
    with pytest.raises(ValueError, match="batch_size is 0"):
        TrainRequest(
            model=MLP, spec=largest(MLP), target="onnx", batch_size=0, objective=ObjectiveSettings(), optimiser=PLAIN
        )
