"""Errors for networks that cannot be trained name the layer, the reason and the remedy before anything is written."""

from dataclasses import replace

import pytest
import torch
from export.export_cases import MLP, train_request
from torch import Tensor, nn

from subfleet.elastic.families.records.residual import Mlp
from subfleet.export.preflight import explain_failure, find_obstacles
from subfleet.export.programs import export_program
from subfleet.export.steps import SampleSpec
from subfleet.protocol.errors import ExportError

pytestmark = [pytest.mark.export, pytest.mark.slow]

TARGETS = ("onnx", "executorch")


class LogGamma(nn.Module):
    """An operator that no supported runtime has."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(x.abs() + 1)


class Masked(nn.Module):
    """A shape that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum().reshape(1, 1).expand(x.shape[0], 1)


def network(layer: nn.Module) -> nn.Module:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 6), layer)])

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks
            self.head = nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    module = Network()
    module(torch.zeros(2, 6))
    return module


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layer", [LogGamma(), Masked()], ids=lambda layer: type(layer).__name__)
def test_the_innermost_layer_is_named_with_reason_and_remedy(layer: nn.Module, target: str) -> None:
    (obstacle,) = find_obstacles(network(layer), SampleSpec(shape=(6,)), target=target, batch_size=2)
    assert obstacle.layer == "blocks.1.1"
    assert obstacle.kind == type(layer).__name__
    assert ("gamma" if isinstance(layer, LogGamma) else "shapes") in f"{obstacle.reason} {obstacle.remedy}"
    assert "use" in obstacle.remedy
    assert "layer 'blocks.1.1'" in str(obstacle)


def test_a_network_of_good_layers_has_no_obstacle() -> None:
    assert find_obstacles(network(nn.Tanh()), SampleSpec(shape=(6,)), target="onnx", batch_size=2) == ()


def test_an_obstacle_outside_all_layers_is_the_networks_own() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.lgamma(x.abs() + 1))
            return logits

    (obstacle,) = find_obstacles(Bare(), SampleSpec(shape=(6,)), target="onnx", batch_size=2)
    assert obstacle.layer == ""
    assert str(obstacle).startswith("the network (Bare) cannot be exported for training")


def test_an_error_names_its_layer_or_stays_as_it_is() -> None:
    error = ExportError("something; do something")
    sample = SampleSpec(shape=(6,))
    explained = explain_failure(error, network(LogGamma()), sample, target="onnx", batch_size=2)
    assert "blocks.1.1" in str(explained)
    assert explain_failure(error, network(nn.Tanh()), sample, target="onnx", batch_size=2) is error


def test_a_request_that_fails_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_log_gamma(config: Mlp) -> nn.Module:
        module = mlp(config)
        module.add_module("special", LogGamma())
        return module

    mlp = Mlp.module
    monkeypatch.setattr(Mlp, "module", with_log_gamma)
    own = replace(MLP, class_count=9)  # no other test has it: its record is kept
    with pytest.raises(ExportError, match=r"^layer 'special' \(lgamma\) cannot be exported .*; use") as raised:
        export_program(train_request("onnx", own))
    assert isinstance(raised.value.__cause__, ExportError)


def test_the_network_is_left_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), LogGamma(), nn.Linear(6, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [str(vars(layer)) for layer in module.modules()]  # hooks among them
    assert find_obstacles(module, SampleSpec(shape=(6,)), target="onnx", batch_size=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [str(vars(layer)) for layer in module.modules()] == attributes
