"""The memory plan: exact on small graphs, and never below what must be held."""

import pytest
import torch
from export.export_cases import MODELS, RESNET, largest, smallest, step_of, train_request
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.liveness import activation_peak_bytes, caller_bytes
from subfleet.export.targets import TARGETS
from subfleet.export.tracing import trace
from subfleet.export.versions import TARGET_NAMES


def test_what_is_alive_at_once() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        a = x * 2.0  # 400 bytes
        b = a.view(10, 10) + 1.0  # 400 more; the view costs nothing
        c = b.sum(0)  # 40 more, while b is alive; a was freed after b
        return (c.sum(0) * x,)  # the result is the caller's

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(100))
    assert activation_peak_bytes(graph) == 800


def test_a_convolution_needs_the_patches_of_one_sample() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.conv2d(x, w),)

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(2, 3, 6, 6), torch.zeros(5, 3, 3, 3))
    assert activation_peak_bytes(graph) == 3 * 3 * 3 * 4 * 4 * 4


@pytest.mark.parametrize("model", MODELS)
def test_the_caller_holds_weights_and_states_twice(model: str) -> None:
    request = train_request("onnx", MODELS[model])
    step = step_of(request)
    weights = sum(tensor.numel() * 4 for tensor in step.example(torch.Generator())[4:])  # parameters and momenta
    assert caller_bytes(step) >= 2 * weights


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_plan_covers_what_must_be_held_and_grows_with_the_subnet(target: str) -> None:
    plans = []
    for spec in (smallest(RESNET), largest(RESNET)):
        step = step_of(train_request(target, RESNET, spec=spec))
        graph = trace(step, TARGETS[target].lowerings)
        lower_bound = caller_bytes(step) + activation_peak_bytes(graph)
        written = TARGETS[target].write_training(graph, step)
        assert written.planned_peak_bytes > lower_bound
        plans.append(written.planned_peak_bytes)
    assert plans[0] < plans[1]
