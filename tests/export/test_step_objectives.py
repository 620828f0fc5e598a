"""Objectives compared with `torch.nn.functional`: loss, every gradient, and the counts."""

from typing import Any

import pytest
import torch
from elastic.recorded_cases import MODULES, record_case
from export.step_rig import assert_close, draw, example, load_values, run, step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import build_module, network_of
from subfleet.export.steps import SampleSpec, Step
from subfleet.export.steps.objectives import OBJECTIVES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings

TOKENS = SampleSpec(shape=(5,), dtype="I64", limit=7)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 3))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))


def expect(step: Step, inputs: dict[str, Tensor], module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Run the step; assert the loss and the plain SGD update of a loss that PyTorch computed."""
    loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    results = run(step, inputs)
    torch.testing.assert_close(results["loss"], loss.detach(), atol=1e-12, rtol=1e-12)
    new = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        new[f"new.parameter.{name}"] = parameter.detach() - inputs["learning_rate"] * parameter.grad
    assert_close({name: results[name] for name in new}, new)
    return results


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("class_mask", [False, True])
def test_cross_entropy(smoothing: float, class_mask: bool) -> None:
    objective = ObjectiveSettings(label_smoothing=smoothing, class_mask=class_mask)
    step = step_of_module(classifier(), (4,), batch_size=6, objective=objective)
    inputs = example(step)
    inputs["label"][0] = -100  # ignored, like the last sample, which is padding
    module = load_values(classifier(), inputs)
    logits = module(inputs["input"])
    if class_mask:
        assert inputs["class_mask"].tolist() == [1, 1, 0]
        logits = logits * inputs["class_mask"]
    loss = functional.cross_entropy(logits[1:-1], inputs["label"][1:-1], label_smoothing=smoothing)
    results = expect(step, inputs, module, loss)
    assert results["count"] == 4
    assert results["correct"] == (logits.argmax(1) == inputs["label"])[1:-1].sum()


class PixelClassifier(nn.Module):
    """A linear map of each pixel; the classes come last."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(2, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.map(images).permute(0, 2, 3, 1)
        return logits


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_of_pixels(smoothing: float) -> None:
    objective = ObjectiveSettings(name="dense_cross_entropy", label_smoothing=smoothing)
    step = step_of_module(PixelClassifier(), (2, 3, 2), batch_size=4, objective=objective)
    inputs = example(step)
    assert (inputs["label"] < 0).any(), "some pixels are of no class"
    module = load_values(PixelClassifier(), inputs)
    logits, labels = module(inputs["input"])[:-1].flatten(0, 2), inputs["label"][:-1].flatten()
    loss = functional.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=smoothing)
    results = expect(step, inputs, module, loss)
    assert results["count"] == (labels >= 0).sum()
    assert results["correct"] == ((logits.argmax(1) == labels) & (labels >= 0)).sum()


def test_classes_of_pixels_that_a_recorded_module_puts_before_its_places() -> None:
    """As segmentation networks do, logits are (batch, classes, height, width)."""
    make, shape, _ = MODULES["shuffled"]
    network = network_of(record_case("shuffled"))
    recorded = build_module(network, network.full_architecture())
    step = step_of_module(recorded, shape, batch_size=4, objective=ObjectiveSettings(name="dense_cross_entropy"))
    inputs = example(step)
    module = load_values(make(), inputs)
    labels = inputs["label"][:-1]
    loss = functional.cross_entropy(module(inputs["input"])[:-1], labels, ignore_index=-1)
    assert expect(step, inputs, module, loss)["count"] == (labels >= 0).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_next_token(smoothing: float) -> None:
    objective = ObjectiveSettings(name="next_token", label_smoothing=smoothing)
    step = step_of_module(language_model(), (), objective=objective, sample=TOKENS)
    inputs = example(step)
    label = next(value for value in step.inputs if value.role == "label")
    assert (label.shape, label.limit, label.dtype) == ((4, 5), 7, "I64")
    real = inputs["label"][:-1] >= 0  # the last sample is padding
    assert 5 < int(real.sum()) < 15
    module = load_values(language_model(), inputs)
    logits = module(inputs["input"])
    loss = functional.cross_entropy(logits[:-1][real], inputs["label"][:-1][real], label_smoothing=smoothing)
    results = expect(step, inputs, module, loss)
    assert results["count"] == real.sum()
    assert results["correct"] == (logits.argmax(2) == inputs["label"])[:-1][real].sum()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("binary_cross_entropy", functional.binary_cross_entropy_with_logits),
        ("mean_squared_error", functional.mse_loss),
    ],
)
def test_objectives_of_numbers(name: Any, function: Any) -> None:
    step = step_of_module(classifier(), (4,), objective=ObjectiveSettings(name=name))
    inputs = example(step)
    module = load_values(classifier(), inputs)
    outputs = module(inputs["input"])
    results = expect(step, inputs, module, function(outputs[:-1], inputs["label"][:-1]))
    assert results["count"] == 9
    correct = ((outputs > 0) == (inputs["label"] > 0.5))[:-1].sum() if name == "binary_cross_entropy" else 0
    assert results["correct"] == correct


@pytest.mark.parametrize("name", OBJECTIVES)
def test_squares_of_counted_losses_are_summed_on_request(name: Any) -> None:
    """Squares of the losses per label, each by PyTorch; the step is otherwise the same."""
    make, shape = {"next_token": (language_model, ()), "dense_cross_entropy": (PixelClassifier, (2, 3, 2))}.get(
        name, (classifier, (4,))
    )
    options: dict[str, Any] = {"sample": TOKENS} if name == "next_token" else {}
    smoothing: dict[str, Any] = {"label_smoothing": 0.1} if ObjectiveSettings(name=name).over_classes else {}
    plain = step_of_module(make(), shape, objective=ObjectiveSettings(name=name, **smoothing), **options)
    step = step_of_module(make(), shape, objective=ObjectiveSettings(name=name, squares=True, **smoothing), **options)
    inputs = example(step)
    results, expected = run(step, inputs), run(plain, inputs)
    outputs, labels = load_values(make(), inputs)(inputs["input"])[:-1], inputs["label"][:-1]  # the last one is padding
    if smoothing:
        counted = labels >= 0
        losses = functional.cross_entropy(outputs[counted], labels[counted], reduction="none", **smoothing)
    elif name == "binary_cross_entropy":
        losses = functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
    else:
        losses = functional.mse_loss(outputs, labels, reduction="none")
    torch.testing.assert_close(results.pop("squares"), losses.detach().square().sum(), atol=1e-12, rtol=1e-12)
    assert_close(results, expected)


@pytest.mark.parametrize("logit", [0.0, 800.0, -800.0])
def test_binary_cross_entropy_of_any_logit(logit: float) -> None:
    logits = torch.tensor([logit], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0.3], dtype=torch.float64)
    actual = OBJECTIVES["binary_cross_entropy"].losses(ObjectiveSettings(), logits, targets).sum()
    expected = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_the_proximal_term() -> None:
    """FedProx: mu / 2 times the squared distance from the first weights, in the gradient alone."""
    plain = step_of_module(classifier(), (4,))
    step = step_of_module(classifier(), (4,), objective=ObjectiveSettings(proximal=True))
    inputs = example(step)
    module = load_values(classifier(), inputs)
    distance = sum(
        (parameter - inputs[f"anchor.{name}"]).square().sum() for name, parameter in module.named_parameters()
    )
    task = functional.cross_entropy(module(inputs["input"][:-1]), inputs["label"][:-1])
    (task + inputs["proximal_mu"] / 2 * distance).backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    results = run(step, inputs)
    torch.testing.assert_close(results["loss"], task.detach())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - inputs["learning_rate"] * parameter.grad
        torch.testing.assert_close(results[f"new.parameter.{name}"], expected, atol=1e-12, rtol=1e-12)

    without = run(step, inputs | {"proximal_mu": torch.zeros((), dtype=torch.float64)})
    assert_close(without, run(plain, {value.name: inputs[value.name] for value in plain.inputs}), 0)


def test_a_mean_of_nothing_is_zero() -> None:
    step = step_of_module(language_model(), (), objective=ObjectiveSettings(name="next_token"), sample=TOKENS)
    inputs = example(step)
    results = run(step, inputs | {"label": torch.full((4, 5), -1)})
    assert results["loss"] == results["count"] == results["correct"] == 0
    assert torch.equal(results["new.parameter.1.weight"], inputs["parameter.1.weight"])


def test_outputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ExportError, match=r"of the shape \(4, 5, 7\), but objective 'cross_entropy' needs logits"):
        step_of_module(language_model(), (), sample=TOKENS)
    with pytest.raises(ExportError, match=r"of the shape \(4, 3\), but objective 'next_token' needs logits"):
        step_of_module(classifier(), (4,), objective=ObjectiveSettings(name="next_token"))
    with pytest.raises(ExportError, match=r"of the shapes \(\(6, 4\),\).*with the first size the batch's 4"):
        step_of_module(
            nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (6, 4))),
            (6,),
            objective=ObjectiveSettings(name="mean_squared_error"),
        )
    with pytest.raises(ExportError, match=r"input of the shape \(4, 9\).*use layers that take this shape"):
        step_of_module(classifier(), (9,))


def test_the_mask_of_classes_is_seen_in_no_other_logit() -> None:
    settings = ObjectiveSettings(class_mask=True)
    logits, labels = draw(2, 3), torch.tensor([0, 1])
    masked = logits * torch.tensor([1.0, 1.0, 0.0])
    losses = OBJECTIVES["cross_entropy"].losses(settings, masked, labels)
    # As in HeteroFL: absent classes count with the logit 0, that is, with the weight 1.
    expected = torch.log(masked[:, :2].exp().sum(1) + 1) - logits[torch.arange(2), labels]
    torch.testing.assert_close(losses, expected)
