"""Training programs of submodels over tokens compared with PyTorch: transformers of 1 or 3 layers, and LSTMs."""

from dataclasses import replace

import pytest
import torch
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT
from export.export_cases import FULL_SGD
from matrices import mostly_long
from shared_programs import program_of
from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.network import Family
from subfleet.export.programs import export_inference_model
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.protocol.training import ObjectiveSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]

SHALLOW_VIT = replace(VIT, widths=(10,), depths=(1,), heads=(3,), hidden_widths=(7,), scaler=True)
SHALLOW_DECODER = replace(DECODER, widths=(8,), depths=(2,), heads=(2,), learnable_steps=True)
MODELS = {model.TYPE: model for model in (SHALLOW_VIT, SHALLOW_DECODER, BERT, CLASSIFIER, LSTM)}
CASES = [(target, family) for family in MODELS for target in TARGET_NAMES if (target, family) != ("executorch", "bert")]
"""Every family on every target, except BERT on ExecuTorch: the classifier has the same blocks."""


def narrow(model: Family) -> Architecture:
    """About half of every axis, and optional blocks only if they have a learnable step."""
    network = network_of(model)
    axes = {name: Prefix(size=(axis.size + 1) // 2) for name, axis in network.axes.items() if axis.kind != "class"}
    blocks = network.full_architecture().blocks if model.learnable_steps else ()
    return Architecture(axes=tuple(sorted(axes.items())), blocks=blocks)


def request_of(family: str, target: str, *, recompute: bool = False) -> TrainRequest:
    model = MODELS[family]
    over_tokens = family in {"decoder", "bert", "lstm"}
    return TrainRequest(
        model=model,
        architecture=narrow(model),
        target=target,
        batch_size=3,
        objective=ObjectiveSettings(name="next_token" if over_tokens else "cross_entropy"),
        optimiser=FULL_SGD,
        recompute=recompute,
    )


def run_request(request: TrainRequest, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    program, step = program_of(request), training_step_of(request)
    named = {value.name: tensor for value, tensor in zip(step.inputs, inputs, strict=True)}
    return list(TARGETS[request.target].run(bytes(program.body), named))


@pytest.mark.parametrize(
    ("target", "family"), mostly_long(CASES, *(case for case in CASES if case != ("executorch", "bert_classifier")))
)
def test_a_program_is_the_step(target: str, family: str) -> None:
    request = request_of(family, target)
    step = training_step_of(request)
    assert 0 < program_of(request).manifest.max_abs_diff <= 1e-4
    for seed in range(2):
        inputs = step.example(torch.Generator().manual_seed(seed))
        for value, result, expected in zip(step.outputs, run_request(request, inputs), step.run(*inputs), strict=True):
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4, msg=value.name)


@pytest.mark.parametrize("family", ["decoder", "lstm"])
def test_blocks_may_be_computed_twice(family: str) -> None:
    request = request_of(family, "onnx", recompute=True)
    inputs = training_step_of(request).example(torch.Generator().manual_seed(1))
    plain = run_request(replace(request, recompute=False), inputs)
    for result, expected in zip(run_request(request, inputs), plain, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


def test_a_models_symbols_bound_the_programs_inputs() -> None:
    (symbols, *_) = training_step_of(request_of("bert", "onnx")).inputs
    assert (symbols.dtype, symbols.shape, symbols.limit) == ("I64", (3, 6), 7)


@pytest.mark.parametrize(
    ("target", "family"), [("onnx", "vit"), ("executorch", "vit"), ("onnx", "bert_classifier"), ("executorch", "lstm")]
)
def test_an_inference_model_is_the_network(target: str, family: str) -> None:
    model = MODELS[family]
    module = build_module(network_of(model), narrow(model))
    request = InferRequest(model=model, architecture=narrow(model), target=target, weights_sha256="0" * 64)
    body, difference = export_inference_model(request, module.state_dict())
    assert body
    assert 0 <= difference <= 1e-4
