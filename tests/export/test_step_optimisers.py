"""Optimisers compared with the classes of `torch.optim`, over ten steps in double precision."""

from typing import Any

import pytest
import torch
from export.step_rig import assert_close, example, load_values, next_inputs, run, step_of_module
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor, nn

from subfleet.export.steps import Step
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = pytest.mark.slow

shares = st.sampled_from([0.0, 0.3, 0.9, 0.99])
decays = st.sampled_from([0.0, 0.01, 0.5])
norms = st.sampled_from([0.0, 0.05, 1e6])
sgd = st.builds(
    OptimiserSettings,
    name=st.just("sgd"),
    momentum=shares,
    dampening=shares,
    weight_decay=decays,
    max_gradient_norm=norms,
)
nesterov = st.builds(
    OptimiserSettings,
    name=st.just("sgd"),
    momentum=st.sampled_from([0.3, 0.9]),
    nesterov=st.just(True),
    weight_decay=decays,
    max_gradient_norm=norms,
)
adam = st.builds(
    OptimiserSettings,
    name=st.sampled_from(["adam", "adamw"]),
    beta1=shares,
    beta2=st.sampled_from([0.0, 0.5, 0.999]),
    epsilon=st.sampled_from([1e-8, 0.1]),
    weight_decay=decays,
    max_gradient_norm=norms,
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 3))


def build_reference(optimiser: OptimiserSettings, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    if optimiser.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=optimiser.momentum,
            dampening=optimiser.dampening,
            nesterov=optimiser.nesterov,
            weight_decay=optimiser.weight_decay,
        )
    kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimiser.name]
    reference: torch.optim.Optimizer = kind(
        parameters,
        lr=learning_rate,
        betas=(optimiser.beta1, optimiser.beta2),
        eps=optimiser.epsilon,
        weight_decay=optimiser.weight_decay,
    )
    return reference


def first_inputs(step: Step) -> dict[str, Tensor]:
    """Inputs of a first step: states are zero."""
    inputs = example(step)
    states = {value.name for value in step.inputs if value.role == "optimiser_state"}
    return {name: torch.zeros_like(tensor) if name in states else tensor for name, tensor in inputs.items()}


@given(optimiser=st.one_of(sgd, nesterov, adam))
@examples(6)
def test_ten_steps_are_those_of_pytorch(optimiser: OptimiserSettings) -> None:
    step = step_of_module(build(), (4,), optimiser=optimiser)
    inputs = first_inputs(step)
    module = load_values(build(), inputs)
    reference = build_reference(optimiser, module, float(inputs["learning_rate"]))
    # A gradient divided by its own size is a sign, which rounding decides where a later step comes near 0.
    is_sign = optimiser.name != "sgd" and optimiser.beta2 == 0 and optimiser.epsilon < 1e-6
    for seed in range(1 if is_sign else 10):
        batch = example(step, seed)
        inputs |= {name: batch[name] for name in ("input", "label", "sample_mask")}
        real = batch["sample_mask"].bool()
        reference.zero_grad()
        nn.functional.cross_entropy(module(batch["input"][real]), batch["label"][real]).backward()  # type: ignore[no-untyped-call]
        if optimiser.max_gradient_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), optimiser.max_gradient_norm)
        reference.step()
        inputs |= next_inputs(run(step, inputs))
    assert_close(
        {name: inputs[f"parameter.{name}"] for name, _ in module.named_parameters()},
        {name: tensor.detach() for name, tensor in module.named_parameters()},
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "optimiser",
    [
        OptimiserSettings(momentum=0.0, weight_decay=0.3, max_gradient_norm=0.05),
        OptimiserSettings(dampening=0.3, weight_decay=0.3),
        OptimiserSettings(nesterov=True, weight_decay=0.3),
        OptimiserSettings(name="adam", weight_decay=0.3),
        OptimiserSettings(name="adamw", weight_decay=0.3),
    ],
)
def test_learning_rate_0_changes_no_bit_of_a_parameter(optimiser: OptimiserSettings, *, accumulate: bool) -> None:
    """In any state of the optimiser; its states still change."""
    objective = ObjectiveSettings(proximal=True)
    step = step_of_module(build(), (4,), optimiser=optimiser, accumulate=accumulate, objective=objective)
    inputs = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in example(step).items()}
    inputs["learning_rate"] = torch.zeros(())
    results = run(step, inputs)
    parameters = [name for name in inputs if name.startswith("parameter.")]
    assert all(torch.equal(results[f"new.{name}"], inputs[name]) for name in parameters)
    states = [name for name in inputs if name.startswith(("momentum.", "first_moment."))]
    assert not any(torch.equal(results[f"new.{name}"], inputs[name]) for name in states)


@pytest.mark.parametrize(
    ("optimiser", "states"),
    [
        (OptimiserSettings(momentum=0.0, dampening=0.5), set()),
        (OptimiserSettings(), {"momentum"}),
        (OptimiserSettings(dampening=0.5), {"momentum", "started"}),
        (OptimiserSettings(name="adamw"), {"first_moment", "second_moment", "first_correction", "second_correction"}),
    ],
)
def test_only_states_that_are_needed_are_kept(optimiser: OptimiserSettings, states: set[str]) -> None:
    step = step_of_module(build(), (4,), optimiser=optimiser)
    state_values = [value for value in step.inputs if value.role == "optimiser_state"]
    assert {value.name.partition(".")[0] for value in state_values} == states
    assert all((value.tensor == "") == (value.shape == ()) for value in state_values)


def test_single_precision_is_as_exact_as_pytorchs_own() -> None:
    """The corrections of Adam's moments lose no digits in the first steps, where 1 - beta ** steps is small."""
    optimiser = OptimiserSettings(name="adam")
    step = step_of_module(build(), (4,), optimiser=optimiser)
    exact = start = first_inputs(step)
    single = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in exact.items()}
    for _ in range(10):
        exact = exact | next_inputs(run(step, exact))
        single |= next_inputs(run(step, single))
    for name in (name for name in exact if name.startswith("parameter.")):
        assert float((exact[name] - single[name]).norm() / (exact[name] - start[name]).norm()) < 5e-6


def test_a_parameter_that_is_not_trained_stays_as_it_is() -> None:
    """As in PyTorch, where parameters without a gradient are not even decayed."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].requires_grad_(requires_grad=False)
    module.register_parameter("spare", nn.Parameter(torch.ones(2)))
    step = step_of_module(module, (4,), optimiser=OptimiserSettings(weight_decay=0.5))
    inputs = example(step)
    results = run(step, inputs)
    for kind in ("parameter", "momentum"):
        assert torch.equal(results[f"new.{kind}.spare"], inputs[f"{kind}.spare"])
    assert [value.name for value in step.inputs if value.role == "frozen"] == ["frozen.0.weight", "frozen.0.bias"]
    assert not any(value.tensor.startswith("0.") for value in step.outputs), "frozen weights are not results"
    assert not torch.equal(results["new.parameter.1.weight"], inputs["parameter.1.weight"])
