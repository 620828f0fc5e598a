"""FjORD's and DepthFL's distillation terms compared with the formulas of their papers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from export.export_cases import RESNET, UNGROUPED_RESNET, largest, scattered, smallest
from export.step_rig import assert_close, draw, example, load_values, run, step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.maps import extract, nested_maps
from subfleet.elastic.network import Family
from subfleet.export.steps import Student
from subfleet.export.steps.objectives import mutual_distillation, self_distillation
from subfleet.protocol.errors import ConfigError, ExportError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings

T = 2.0
SELF = ObjectiveSettings(distillation="self", temperature=T)
MUTUAL = ObjectiveSettings(distillation="mutual", temperature=T)
Choose = Callable[[Family], Architecture]


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The usual PyTorch form; the mean over samples."""
    return functional.kl_div(
        functional.log_softmax(student / T, 1), functional.softmax(teacher.detach() / T, 1), reduction="batchmean"
    ) * (T * T)


class Exits(nn.Module):
    """A classifier with three exits at increasing depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = []
        for layer, head in zip(self.layers, self.exits, strict=True):
            x = torch.tanh(layer(x))
            logits.append(head(x))
        return tuple(logits)


def test_the_terms_are_zero_between_equals_and_give_the_teacher_no_gradient() -> None:
    logits = draw(4, 3).requires_grad_()
    for term in (self_distillation(logits, logits, SELF), mutual_distillation([logits, logits.clone()], MUTUAL)):
        torch.testing.assert_close(term, torch.zeros(4, dtype=torch.float64), atol=1e-15, rtol=0)
    teacher, student = draw(4, 3, seed=1).requires_grad_(), draw(4, 3, seed=2).requires_grad_()
    term = self_distillation(teacher, student, SELF)
    torch.testing.assert_close(term.mean(), divergence(teacher, student))
    term.sum().backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    assert teacher.grad is None
    assert student.grad is not None


def test_mutual_distillation() -> None:
    """DepthFL: the cross-entropies of all exits, and the mean divergence of each from the others."""
    step = step_of_module(Exits(), (4,), objective=MUTUAL)
    inputs = example(step)
    module = load_values(Exits(), inputs)
    exits = [logits[:-1] for logits in module(inputs["input"])]  # the last sample is padding
    labels = inputs["label"][:-1]
    loss = sum(functional.cross_entropy(logits, labels) for logits in exits)
    for i, student in enumerate(exits):
        divergences = [divergence(teacher, student) for j, teacher in enumerate(exits) if j != i]
        loss = loss + inputs["distillation_weight"] * sum(divergences) / 2
    results = run(step, inputs)
    check_update(results, inputs, dict(module.named_parameters()), loss)
    assert results["correct"] == (exits[-1].argmax(1) == labels).sum()


def check_update(results: dict[str, Tensor], inputs: dict[str, Tensor], parameters: dict[str, Any], loss: Any) -> None:
    loss.backward()
    torch.testing.assert_close(results["loss"], loss.detach(), atol=1e-12, rtol=1e-12)
    expected = {name: tensor.detach() - inputs["learning_rate"] * tensor.grad for name, tensor in parameters.items()}
    assert_close({name: results[f"new.parameter.{name}"] for name in expected}, expected, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "choose_outer", "choose_inner"),
    [
        (RESNET, largest, smallest),
        (UNGROUPED_RESNET, largest, scattered),
    ],
)
def test_self_distillation_of_a_nested_submodel(model: Family, choose_outer: Choose, choose_inner: Choose) -> None:
    """FjORD: the student shares the network's weights, so every term changes them; its loss has the factor 1 - a."""
    network, outer, inner = network_of(model), choose_outer(model), choose_inner(model)
    student = Student(module=build_module(network, inner), maps=nested_maps(network, outer, inner))
    step = step_of_module(build_module(network, outer), model.input_shape, objective=SELF, student=student)
    inputs = example(step)
    full = load_values(build_module(network, outer), inputs)
    parameters = dict(full.named_parameters())
    nested = {name: part.extract(parameters[name]) for name, part in student.maps.items()}
    teacher = full(inputs["input"])[:-1]
    small = torch.func.functional_call(build_module(network, inner).double(), nested, (inputs["input"],))[:-1]
    weight, labels = inputs["distillation_weight"], inputs["label"][:-1]
    loss = functional.cross_entropy(teacher, labels)
    loss = loss + (1 - weight) * functional.cross_entropy(small, labels) + weight * divergence(teacher, small)
    check_update(run(step, inputs), inputs, parameters, loss)


@pytest.mark.parametrize(
    ("choose_outer", "choose_inner"),
    [(largest, smallest), (largest, scattered), (scattered, lambda model: Architecture(axes=scattered(model).axes))],
)
def test_maps_of_a_nested_submodel_compose(choose_outer: Choose, choose_inner: Choose) -> None:
    """Extracting the larger submodel and then the smaller one equals extracting the smaller one."""
    network, outer, inner = network_of(RESNET), choose_outer(RESNET), choose_inner(RESNET)
    state = {decl.name: draw(*decl.shape, seed=seed) for seed, decl in enumerate(network.tensors.values())}
    local = extract(network, outer, state)
    nested = {name: part.extract(local[name]) for name, part in nested_maps(network, outer, inner).items()}
    assert_close(nested, extract(network, inner, state), 0)


def test_what_does_not_fit_is_named() -> None:
    network = network_of(RESNET)
    with pytest.raises(ConfigError, match=r"'section0\.block1"):
        nested_maps(network, smallest(RESNET), largest(RESNET))
    with pytest.raises(ConfigError, match=r"keeps index 0 of axis .* which the outer submodel lacks"):
        nested_maps(network, scattered(RESNET), Architecture(blocks=scattered(RESNET).blocks))
    with pytest.raises(ExportError, match="distillation is 'self' and the student network is missing"):
        step_of_module(nn.Linear(4, 3), (4,), objective=SELF)
    with pytest.raises(ExportError, match="3 exits and distillation is 'none'"):
        step_of_module(Exits(), (4,))
    with pytest.raises(ExportError, match="1 exits and distillation is 'mutual'"):
        step_of_module(nn.Linear(4, 3), (4,), objective=MUTUAL)
    maps = {"weight": nested_maps(network, largest(RESNET), smallest(RESNET))["head.weight"]}
    with pytest.raises(ExportError, match=r"student's logits are of the shapes \(\(4, 2\),\)"):
        step_of_module(nn.Linear(4, 3), (4,), objective=SELF, student=Student(module=nn.Linear(4, 2), maps=maps))
    tracked = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ExportError, match=r"student network keeps the buffer '1\.running_mean'.*GroupNorm"):
        step_of_module(nn.Linear(4, 3), (4,), objective=SELF, student=Student(module=tracked, maps=maps))
