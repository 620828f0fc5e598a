"""Inference models that contain their weights, compared with PyTorch."""

import onnx
import pytest
import torch
from export.export_cases import CASES, MLP, RESNET, largest, smallest
from torch import Tensor, nn

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family
from subfleet.export.programs import export_inference_model, write_inference_model
from subfleet.export.requests import InferRequest
from subfleet.export.steps import SampleSpec, inference_step
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.submodel import Architecture

pytestmark = [pytest.mark.export, pytest.mark.slow]


def infer_request(target: str, model: Family, architecture: Architecture) -> InferRequest:
    return InferRequest(model=model, architecture=architecture, target=target, weights_sha256="0" * 64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_model_gives_the_logits_of_pytorch(target: str, case: str) -> None:
    config, submodel = CASES[case]()
    network = network_of(config)
    state = extract(network, submodel, init_state(network, 3))
    body, difference = export_inference_model(infer_request(target, config, submodel), state)
    module = build_module(network, submodel)
    module.load_state_dict(state)

    assert 0 <= difference <= 1e-4
    inputs = torch.randn(5, *config.input_shape, generator=torch.Generator().manual_seed(1))
    batches = (
        [inputs] if target == "onnx" else [inputs[index : index + 1] for index in range(5)]
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
def test_tensors_that_are_not_the_submodels_are_refused(target: str) -> None:
    state = init_state(network_of(MLP), 0)
    with pytest.raises(ExportError, match=r"'.*' has the shape .* but the submodel needs .*; extract"):
        export_inference_model(infer_request(target, MLP, smallest(MLP)), state)
    missing = dict(list(state.items())[1:])
    with pytest.raises(ExportError, match="has the shape None"):
        export_inference_model(infer_request(target, MLP, largest(MLP)), missing)


class ClassToken(nn.Module):
    """Expands a parameter to the size of the batch, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 3))
        self.head = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        logits: Tensor = self.head(torch.cat([token, x], dim=1).flatten(1))
        return logits


def test_a_network_bound_to_its_batch_takes_one_sample_at_a_time() -> None:
    module = ClassToken()
    step = inference_step(module, SampleSpec(shape=(2, 3)), batch_size=TARGETS["onnx"].inference_batch_size)
    weights = {name: tensor.detach() for name, tensor in module.named_parameters()}
    body, difference = write_inference_model(step, weights, target="onnx")
    assert difference <= 1e-6
    assert onnx.load_from_string(body).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    sample = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(TARGETS["onnx"].run(body, {"input": sample})[0], module(sample).detach())
