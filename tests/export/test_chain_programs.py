"""Chains written for every target: their paths train and evaluate as in PyTorch."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from export.chain_cases import CLIPPED, CNN, PATHS, PathRun, evaluate_request, train_request
from matrices import mostly_long
from shared_programs import program_of
from torch import Tensor

from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.export.programs import export_program
from subfleet.export.request_steps import step_of, training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import Step
from subfleet.export.verification.verifying import seeded_generator
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import decode_program, encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.tensors import decode_container
from subfleet.protocol.training import OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]

TARGETS = ("onnx", "executorch", "torch")
ADAMW = OptimiserSettings(name="adamw", weight_decay=0.1)
CASES = [(target, name, CLIPPED) for target in TARGETS for name in PATHS]
CASES += [("torch", "rnn", ADAMW), ("torch", "rnn", OptimiserSettings(dampening=0.5, nesterov=False))]


def weights_of(name: str) -> dict[str, Tensor]:
    model, _ = PATHS[name]
    return init_state(network_of(model), 0)


def realised_request(request: TrainRequest, name: str) -> TrainRequest:
    model, path = PATHS[name]
    network = network_of(model)
    return replace(
        request, model=specialise_family(network, path_architecture(network, path)), architecture=Architecture()
    )


@pytest.mark.parametrize(
    ("target", "name", "optimiser"),
    mostly_long(CASES, ("onnx", "cnn", CLIPPED), ("executorch", "rnn", CLIPPED), ("torch", "rnn", ADAMW)),
)
def test_a_path_trains_as_in_pytorch(target: str, name: str, optimiser: OptimiserSettings) -> None:
    """Two steps, the second with padding, compared with the path's unchanged module in double precision."""
    model, path = PATHS[name]
    request = train_request(model, target, optimiser=optimiser)
    chain = PathRun(program_of(request), path, weights_of(name))
    step = training_step_of(realised_request(request, name))
    parameters = {value.tensor: chain.weights[value.tensor] for value in step.inputs if value.role == "parameter"}
    buffers = {value.tensor: chain.weights[value.tensor] for value in step.inputs if value.role == "buffer"}
    inputs = dict(zip((value.name for value in step.inputs), step.example(seeded_generator("a")), strict=True))
    inputs |= {f"parameter.{key}": tensor for key, tensor in parameters.items()}
    inputs |= {f"buffer.{key}": tensor for key, tensor in buffers.items()}
    inputs |= {v.name: torch.zeros(v.shape) for v in step.inputs if v.role == "optimiser_state"}
    inputs = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
    for real_count in (4, 3):
        inputs |= batch_of(step, real_count)
        results = step.reference(*(inputs[value.name] for value in step.inputs))
        expected = {value.name: tensor for value, tensor in zip(step.outputs, results, strict=True)}
        batch = {key: t.float() if t.is_floating_point() else t for key, t in batch_of(step, real_count).items()}
        metrics = chain.train({**batch, "batch_weight": expected["count"].float()}, optimiser)
        assert {key: float(t) for key, t in metrics.items()} == pytest.approx(
            {key: float(expected[key]) for key in metrics}, rel=1e-5
        )
        inputs |= {key.removeprefix("new."): tensor for key, tensor in expected.items() if key.startswith("new.")}
    for value in step.inputs:
        if value.role in ("parameter", "buffer"):
            torch.testing.assert_close(
                chain.weights[value.tensor].double(), inputs[value.name], atol=2e-6, rtol=2e-5, msg=value.name
            )
    untouched = weights_of(name).keys() - parameters.keys() - buffers.keys()
    assert untouched
    assert all(torch.equal(chain.weights[key], weights_of(name)[key]) for key in untouched)


def batch_of(step: Step, real_count: int) -> dict[str, Tensor]:
    example = dict(
        zip((v.name for v in step.inputs), step.example(seeded_generator(f"batch {real_count}")), strict=True)
    )
    mask = (torch.arange(4) < real_count).double()
    batch = {name: example[name] for name in ("input", "label")}
    batch["input"] = batch["input"].double() if batch["input"].is_floating_point() else batch["input"]
    return {**batch, "sample_mask": mask, "learning_rate": torch.tensor(0.1).double()}


@pytest.mark.parametrize(
    ("target", "name"),
    mostly_long(product(TARGETS, PATHS), ("onnx", "rnn"), ("executorch", "cnn"), ("torch", "cnn")),
)
def test_a_path_is_evaluated_as_in_pytorch(target: str, name: str) -> None:
    model, path = PATHS[name]
    request = evaluate_request(model, target)
    program, weights = program_of(request), weights_of(name)
    network = network_of(model)
    step = step_of(replace(request, model=specialise_family(network, path_architecture(network, path))))
    drawn = dict(zip((value.name for value in step.inputs), step.example(seeded_generator("b")), strict=True))
    inputs = drawn | {value.name: weights[value.tensor] for value in step.inputs if value.tensor}
    doubled = (inputs[value.name] for value in step.inputs)
    expected = step.reference(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in doubled))
    results = PathRun(program, path, weights).evaluate({key: drawn[key] for key in ("input", "label", "sample_mask")})
    real = drawn["sample_mask"] > 0
    for value, tensor in zip(step.outputs, expected, strict=True):
        actual, right = results[value.name].double(), tensor
        actual, right = (actual[real], right[real]) if value.role == "logits" else (actual, right)
        torch.testing.assert_close(actual, right, atol=1e-5, rtol=1e-5, msg=value.name)


@pytest.mark.parametrize("target", mostly_long(TARGETS, "onnx", "executorch"))
def test_every_piece_is_verified_and_travels(target: str) -> None:
    program = program_of(train_request(CNN, target))
    again = decode_program(encode_program(program))
    manifest = again.manifest
    assert manifest == program.manifest
    assert manifest.max_abs_diff <= 1e-5
    if target != "torch":
        assert set(decode_container(again.body).tensors) == {piece.name for piece in manifest.pieces}
    chain = manifest.chain
    assert chain is not None
    assert manifest.planned_peak_bytes == chain.plan_memory(chain.links).largest_peak_bytes


def test_a_piece_with_a_wrong_gradient_is_not_written() -> None:
    steps = [
        piece for piece in program_of(train_request(CNN, "onnx")).manifest.pieces if piece.name == "fixed1/backward"
    ]
    (piece,) = steps
    assert piece.outputs[1].name == "gradient.reduction0.layers.filter.conv.weight"
    request = train_request(CNN, "onnx")
    original = torch.autograd.grad

    def grad(outputs: Any, inputs: list[Tensor], *args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = list(original(outputs, inputs, *args, **options))
        if gradients[1] is not None and tuple(gradients[1].shape) == piece.outputs[1].shape:
            gradients[1] = gradients[1] * 1.1
        return tuple(gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        with pytest.raises(ExportError, match=r"'gradient\..*' is off by"):
            export_program(request)
