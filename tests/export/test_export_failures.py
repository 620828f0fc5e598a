"""Errors of exports name the operator, layer or value, and what to do."""

import pytest
import torch
from export.export_cases import MLP, PLAIN, largest, train_request
from torch import Tensor, nn

from subfleet.export.preflight import explain_failure, find_obstacles
from subfleet.export.programs import export_program, write_program
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.targets import TARGETS, find_target
from subfleet.export.tracing import trace
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_defect_in_a_lowering_is_found(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dict(TARGETS[target].lowerings)
    broken[torch.ops.aten.threshold_backward.default] = lambda gradient, output, threshold: gradient
    monkeypatch.setattr(type(TARGETS[target]), "lowerings", broken)
    with pytest.raises(ExportError, match=r"is off by .* but at most"):
        export_program(train_request(target))


def step_through(layer: nn.Module) -> Step:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), layer, nn.Linear(4, 2))
    return training_step(module, SampleSpec(shape=(6,)), batch_size=2, objective=ObjectiveSettings(), optimiser=PLAIN)


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_an_operator_without_translation_is_named(target: str) -> None:
    class Unusual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            curved: Tensor = torch.special.bessel_j0(x).detach() * x
            return curved

    step = step_through(Unusual())
    graph = trace(step, TARGETS[target].lowerings)
    with pytest.raises(ExportError, match=r"aten\.\w+.* \(node '.*'\).*; compute it by sums"):
        TARGETS[target].write_training(graph, step)


def test_a_layer_that_depends_on_values_is_refused() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(ExportError, match=r"cannot be traced.*shapes do not depend on values"):
        trace(step_through(Choosing()), TARGETS["onnx"].lowerings)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ExportError, match=r"'tflite', but must be one of \['executorch', 'onnx'\]"):
        find_target("tflite")
    with pytest.raises(ExportError, match="'tflite'"):
        _ = train_request("tflite").program_id
    with pytest.raises(ValueError, match="batch_size is 0"):
        TrainRequest(
            model=MLP,
            architecture=largest(MLP),
            target="onnx",
            batch_size=0,
            objective=ObjectiveSettings(),
            optimiser=PLAIN,
        )


def _fail(*_arguments: object) -> None:
    raise KeyError("a shape")


@pytest.mark.slow
def test_errors_of_any_type_become_export_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of any tool that writes or runs a program becomes an ExportError with the cause and what to do."""
    step = training_step_of(train_request("onnx"))
    for method in ("write_training", "run"):
        with monkeypatch.context() as patched:
            patched.setattr(type(TARGETS["onnx"]), method, _fail)
            with pytest.raises(
                ExportError, match=r"cannot be written: KeyError: 'a shape'; use other layers"
            ) as raised:
                write_program(step, target="onnx", program_id="x")
        assert isinstance(raised.value.__cause__, KeyError)
    with monkeypatch.context() as patched:
        patched.setattr(type(TARGETS["onnx"]), "write_training", _fail)
        module = nn.Sequential(nn.Linear(3, 2))
        (obstacle,) = find_obstacles(module, SampleSpec(shape=(3,)), target="onnx", batch_size=2)
        assert obstacle.layer == "0"
        assert "KeyError" in obstacle.reason


def test_a_failing_explanation_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("subfleet.export.preflight.find_obstacles", fail)
    error = ExportError("something; do something")
    explained = explain_failure(error, nn.Linear(3, 2), SampleSpec(shape=(3,)), target="onnx", batch_size=2)
    assert explained is error
