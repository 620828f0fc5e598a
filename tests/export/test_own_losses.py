"""Networks with a loss of their own are trained by it, on every runtime, and padding does not count."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from export.step_rig import assert_close, example, load_values, run
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.recording.loading import record_network
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, training_step
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = pytest.mark.slow

WEIGHTS = torch.linspace(0.5, 1.5, 5)
BATCH = 6


class Case(NamedTuple):
    """A loss, and the objective that says what its labels are."""

    loss: Callable[[Tensor, Tensor], Tensor]
    objective: Objective = "cross_entropy"


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def log_likelihood(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(outputs.log_softmax(1), labels, WEIGHTS.to(outputs), reduction="none", ignore_index=2)


def gathered(outputs: Tensor, labels: Tensor) -> Tensor:
    return -outputs.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


def towards_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - functional.one_hot(labels, 5)).square().mean(1)


def quantile(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets))


NUMBERS: Objective = "mean_squared_error"
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "focal": Case(focal),
        "weighted and smooth": Case(nn.CrossEntropyLoss(WEIGHTS, reduction="none", label_smoothing=0.1)),
        "an ignored class": Case(nn.CrossEntropyLoss(reduction="none", ignore_index=1)),
        "log likelihood": Case(log_likelihood),
        "gathered": Case(gathered),
        "towards classes": Case(towards_classes),
        "weighted binary": Case(
            nn.BCEWithLogitsLoss(WEIGHTS, reduction="none", pos_weight=2 * WEIGHTS), "binary_cross_entropy"
        ),
        "huber": Case(nn.HuberLoss(reduction="none", delta=0.7), NUMBERS),
        "smooth l1": Case(nn.SmoothL1Loss(reduction="none", beta=0.3), NUMBERS),
        "l1": Case(nn.L1Loss(reduction="none"), NUMBERS),
        "quantile": Case(quantile, NUMBERS),
    }
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))


@pytest.mark.parametrize("name", CASES)
def test_a_step_follows_the_loss_of_real_samples(name: str) -> None:
    """Against plain PyTorch with the function itself, in double precision; the last two samples are padding."""
    loss, objective = CASES[name]
    network = network_of(record_network(build(), (8,), loss=loss))
    step = training_step(
        build_module(network, network.full_architecture()),
        SampleSpec(shape=(8,)),
        batch_size=BATCH,
        objective=ObjectiveSettings(name=objective, squares=True),
        optimiser=OptimiserSettings(momentum=0.0),
    )
    inputs = example(step)
    inputs["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    results = run(step, inputs)
    module, labels = load_values(build(), inputs), inputs["label"][:4]
    function = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    losses = function(module(inputs["input"][:4]), labels)
    losses.mean().backward()
    expected = {
        f"new.parameter.{key}": tensor - inputs["learning_rate"] * tensor.grad
        for key, tensor in module.named_parameters()
        if tensor.grad is not None
    }
    expected |= {"loss": losses.mean(), "squares": losses.square().sum()}
    assert_close({key: results[key] for key in expected}, expected)


ON_BOTH = ("focal", "weighted and smooth", "weighted binary", "huber")
PROGRAMS = [
    pytest.param(name, target, marks=() if name in ON_BOTH and target == "onnx" else pytest.mark.long)
    for name in CASES
    for target in ("onnx", "executorch")
]


@pytest.mark.export
@pytest.mark.parametrize(("name", "target"), PROGRAMS)
def test_its_program_is_verified(name: str, target: str) -> None:
    """The exporter compares the program on its runtime with PyTorch, and refuses it if they differ."""
    loss, objective = CASES[name]
    request = TrainRequest(
        model=record_network(build(), (8,), loss=loss),
        architecture=Architecture(),
        target=target,
        batch_size=BATCH,
        objective=ObjectiveSettings(name=objective),
        optimiser=OptimiserSettings(),
    )
    assert export_program(request).body
