"""Micro-batches with summed gradients take the step of the whole batch."""

from typing import Any

import pytest
import torch
from export.step_rig import assert_close, example, load_values, next_inputs, run, step_of_module
from torch import Tensor, nn

from subfleet.export.steps import SampleSpec
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

WHOLE, PART = 6, 2
OPTIMISERS = {
    "sgd": OptimiserSettings(momentum=0.9, dampening=0.3, weight_decay=0.1, max_gradient_norm=0.05),
    "nesterov": OptimiserSettings(momentum=0.9, nesterov=True),
    "no momentum": OptimiserSettings(momentum=0.0, weight_decay=0.1),
    "adam": OptimiserSettings(name="adam", weight_decay=0.1, max_gradient_norm=0.05),
    "adamw": OptimiserSettings(name="adamw", weight_decay=0.1),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 4),
        nn.Linear(4, 6),
        nn.GroupNorm(1, 5),
        nn.Dropout(0.3),
        nn.BatchNorm1d(5).eval(),
        nn.Linear(6, 7),
    )


def settings_of(optimiser: str) -> dict[str, Any]:
    return {
        "objective": ObjectiveSettings(name="next_token", proximal=True, label_smoothing=0.1),
        "optimiser": OPTIMISERS[optimiser],
        "sample": SampleSpec(shape=(5,), dtype="I64", limit=7),
    }


def first_inputs(step: Any) -> dict[str, Tensor]:
    """Inputs of a first step: states and summed gradients are zero."""
    inputs = example(step)
    zero = {value.name for value in step.inputs if value.role in ("optimiser_state", "gradient")}
    return {name: torch.zeros_like(tensor) if name in zero else tensor for name, tensor in inputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_micro_batches_take_the_step_of_the_batch(optimiser: str, dtype: torch.dtype) -> None:
    whole = step_of_module(network(), (), batch_size=WHOLE, **settings_of(optimiser))
    part = step_of_module(network(), (), batch_size=PART, accumulate=True, **settings_of(optimiser))
    large = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in first_inputs(whole).items()
    }
    small = {
        name: large.get(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in first_inputs(part).items()
    }
    batched = [value.name for value in whole.inputs if value.role in ("input", "label", "sample_mask", "random")]
    for seed in range(2):
        batch = example(whole, seed)
        large |= {name: batch[name].to(large[name].dtype) for name in batched}
        results = run(whole, large)
        sums = {name: torch.zeros((), dtype=dtype) for name in ("loss", "correct", "count")}
        for start in range(0, WHOLE, PART):
            small |= {name: large[name][start : start + PART] for name in batched}
            small["batch_weight"] = results["count"]
            small["apply"] = torch.tensor(float(start + PART == WHOLE), dtype=dtype)
            before = small
            parts = run(part, small)
            small = small | next_inputs(parts)
            sums = {name: total + parts[name] for name, total in sums.items()}
            if start + PART < WHOLE:  # before the last part, only the gradients change
                unchanged = [name for name in next_inputs(parts) if not name.startswith("gradient.")]
                assert_close({name: small[name] for name in unchanged}, {name: before[name] for name in unchanged}, 0)
        large |= next_inputs(results)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-5
        assert_close(sums, {name: results[name] for name in sums}, tolerance)
        assert_close({name: small[name] for name in next_inputs(results)}, next_inputs(results), tolerance)
        assert all(not tensor.any() for name, tensor in small.items() if name.startswith("gradient."))


@pytest.mark.parametrize("tracked", [True, False])
def test_statistics_of_a_batch_cannot_be_accumulated(tracked: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=tracked), nn.Linear(4, 2))
    with pytest.raises(ExportError, match=r"layer '1' normalises by the statistics of its batch.*freeze the layer"):
        step_of_module(module, (4,), accumulate=True)
    module[1].eval()
    if tracked:
        step_of_module(module, (4,), accumulate=True)


def normalising() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def test_a_batch_in_one_part_has_the_gradients_of_pytorch_by_its_own_statistics() -> None:
    """Scores are computed from such gradients; the last sample is padding."""
    step = step_of_module(normalising(), (2, 5, 5), batch_size=5, accumulate=True, one_part=True)
    inputs = first_inputs(step)
    inputs["input"] = inputs["input"] * 3 + 20
    inputs |= {name: torch.tensor(value, dtype=torch.float64) for name, value in (("apply", 0.0), ("batch_weight", 4))}
    module = load_values(normalising(), inputs)
    loss = nn.functional.cross_entropy(module(inputs["input"][:4]), inputs["label"][:4])
    names = [name for name, _ in module.named_parameters()]
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    results = run(step, inputs)
    actual = {name: results[f"new.gradient.{name}"] for name in names}
    assert_close(actual, dict(zip(names, gradients, strict=True)), 1e-11)
    assert_close(
        {name: results[f"new.parameter.{name}"] for name in names},
        {name: inputs[f"parameter.{name}"] for name in names},
        0,
    )


def test_batches_in_one_part_train_as_without_summed_gradients() -> None:
    options: dict[str, Any] = {"batch_size": 5, "optimiser": OPTIMISERS["sgd"]}
    plain = step_of_module(normalising(), (2, 5, 5), **options)
    summing = step_of_module(normalising(), (2, 5, 5), accumulate=True, one_part=True, **options)
    inputs, summing_inputs = first_inputs(plain), first_inputs(summing)
    for _ in range(2):
        results = run(plain, inputs)
        summing_results = run(summing, summing_inputs | inputs | {"batch_weight": results["count"]})
        assert_close({name: summing_results[name] for name in results}, results)
        inputs |= next_inputs(results)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_batch_without_counted_labels_has_no_gradient(*, accumulate: bool) -> None:
    step = step_of_module(nn.Linear(4, 3), (4,), accumulate=accumulate)
    inputs = example(step) | {"label": torch.full((4,), -100), "batch_weight": torch.zeros((), dtype=torch.float64)}
    inputs |= {name: torch.zeros_like(tensor) for name, tensor in inputs.items() if name.startswith("gradient.")}
    results = run(step, inputs)
    assert results["loss"] == results["correct"] == results["count"] == 0
    assert_close(next_inputs(results), {name: inputs[name] for name in next_inputs(results)}, 0)
