"""Dropout takes its random numbers from the step's inputs, and otherwise works as in PyTorch."""

from typing import Any

import pytest
import torch
from export.step_rig import assert_close, example, load_values, run, step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.steps import SampleSpec, inference_step
from subfleet.protocol.errors import ExportError


def run_dropout(function: Any, inputs: Tensor, random: Tensor, **settings: Any) -> Tensor:
    context = LayerContext(torch.ones(len(inputs)), [random])
    with LayerReplacing(LAYERS, context):
        result: Tensor = function(inputs, **settings)
    return result


@pytest.mark.parametrize(
    ("function", "shape", "random_shape"),
    [
        (functional.dropout, (4, 6), (4, 6)),
        (functional.dropout1d, (4, 6, 5), (4, 6, 1)),
        (functional.dropout2d, (4, 6, 5, 3), (4, 6, 1, 1)),
        (functional.dropout3d, (4, 6, 5, 3, 2), (4, 6, 1, 1, 1)),
    ],
)
def test_elements_below_p_are_dropped_and_the_rest_is_scaled(
    function: Any, shape: tuple[int, ...], random_shape: tuple[int, ...]
) -> None:
    inputs = torch.rand(shape) + 1
    random = torch.rand(random_shape)
    outputs = run_dropout(function, inputs, random, p=0.4)
    torch.testing.assert_close(outputs, torch.where(random < 0.4, 0.0, inputs / 0.6))
    assert 0 < int((outputs == 0).sum()) < outputs.numel()
    assert torch.equal(run_dropout(function, inputs, random, p=0.4, training=False), inputs)
    assert torch.equal(run_dropout(function, inputs, random, p=0.0), inputs)
    assert not run_dropout(function, inputs, random, p=1.0).any()


def test_a_number_at_the_edge_is_decided_alike_in_both_precisions() -> None:
    """0.7 differs in single precision; the program and its check must keep the same elements."""
    for p in (0.1, 0.7):
        random = torch.tensor([p])
        outputs = [
            run_dropout(functional.dropout, torch.ones(1, dtype=dtype), random.to(dtype), p=p)
            for dtype in (torch.float32, torch.float64)
        ]
        assert bool(outputs[0]) == bool(outputs[1])


def test_a_step_with_dropout_can_be_repeated() -> None:
    module = nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5), nn.Dropout(0.2, inplace=True), nn.Linear(5, 3)
    )
    step = step_of_module(module, (4,))
    randoms = [value for value in step.inputs if value.role == "random"]
    assert [(value.name, value.shape) for value in randoms] == [("random.0", (4, 6)), ("random.1", (4, 5))]
    inputs = example(step)
    first, second = run(step, inputs), run(step, inputs)
    assert_close(first, second, 0)
    other = run(step, inputs | {"random.0": 1 - inputs["random.0"]})
    assert not torch.equal(first["new.parameter.0.weight"], other["new.parameter.0.weight"])
    undropped = run(step, inputs | {value.name: torch.ones_like(inputs[value.name]) * 0.999 for value in randoms})
    hidden = inputs["input"]
    for layer, fraction in (("0", 0.5), ("2", 0.8), ("4", 1.0)):
        hidden = (
            functional.linear(hidden, inputs[f"parameter.{layer}.weight"], inputs[f"parameter.{layer}.bias"]) / fraction
        )
    loss = functional.cross_entropy(hidden[:-1], inputs["label"][:-1])
    torch.testing.assert_close(undropped["loss"], loss.detach())


def test_inference_drops_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    step = inference_step(module, SampleSpec(shape=(4,)), batch_size=2)
    inputs = example(step)
    reference = load_values(module, inputs).eval()
    torch.testing.assert_close(run(step, inputs)["logits"], reference(inputs["input"]).detach())
    module.float().train()
    inference_step(module, SampleSpec(shape=(4,)), batch_size=2)
    assert module[1].training


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"layer '1' draws its own randomness.*use nn.Dropout"):
        step_of_module(nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout()), (4,))
    with pytest.raises(
        ExportError, match=r"layer '0' drops channels of an input of the shape \(4, 3\).*keep the batch"
    ):
        step_of_module(nn.Sequential(nn.Dropout1d()), (3,))
