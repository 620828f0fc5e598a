"""Inference models with their weights inside against PyTorch."""

import onnx
import pytest
import torch
from export.export_cases import CASES, MLP, RESNET, largest, smallest

from subfleet.elastic.families import build_module, init_state, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import ModelConfig
from subfleet.export.programs import export_inference_model
from subfleet.export.requests import InferRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.subnet import SubnetSpec

pytestmark = [pytest.mark.export, pytest.mark.slow]


def infer_request(target: str, model: ModelConfig, spec: SubnetSpec) -> InferRequest:
    return InferRequest(model=model, spec=spec, target=target, weights_sha256="0" * 64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_model_gives_the_logits_of_pytorch(target: str, case: str) -> None:
    config, subnet = CASES[case]
    network = network_of(config)
    state = extract(network, subnet, init_state(network, 3))
    body, difference = export_inference_model(infer_request(target, config, subnet), state)
    module = build_module(network, subnet)
    module.load_state_dict(state)

    assert 0 <= difference <= 1e-4
    inputs = torch.randn(5, *config.input_shape, generator=torch.Generator().manual_seed(1))
    batches = (
        [inputs] if target == "onnx" else [inputs[place : place + 1] for place in range(5)]
    )  # a .pte takes one sample at a time
    logits = torch.cat([TARGETS[target].run(body, {"input": batch})[0] for batch in batches])
    torch.testing.assert_close(logits, module(inputs).detach(), atol=1e-5, rtol=1e-5)


def test_an_onnx_model_is_plain_and_complete() -> None:
    network = network_of(RESNET)
    body, _ = export_inference_model(infer_request("onnx", RESNET, largest(RESNET)), init_state(network, 0))
    model = onnx.load_from_string(body)
    assert [value.name for value in model.graph.input] == ["input"]
    assert [value.name for value in model.graph.output] == ["logits"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert not any(tensor.external_data for tensor in model.graph.initializer)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_tensors_that_are_not_the_subnets_are_refused(target: str) -> None:
    state = init_state(network_of(MLP), 0)
    with pytest.raises(ExportError, match=r"'.*' has the shape .* but the subnet needs .*; extract"):
        export_inference_model(infer_request(target, MLP, smallest(MLP)), state)
    missing = dict(list(state.items())[1:])
    with pytest.raises(ExportError, match="has the shape None"):
        export_inference_model(infer_request(target, MLP, largest(MLP)), missing)
