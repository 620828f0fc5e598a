"""Convolutions of every form and their gradients in ONNX Runtime, compared with PyTorch in double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.steps import Step
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace
from subfleet.protocol.programs import ValueInfo

pytestmark = [pytest.mark.slow, pytest.mark.export]

CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one dimension": (functional.conv1d, (2, 3, 17), (5, 3, 4), {"stride": 3, "padding": 2, "dilation": 2}),
    "one dimension, groups": (functional.conv1d, (2, 4, 20), (6, 2, 3), {"groups": 2, "padding": 1}),
    "many channels": (functional.conv2d, (2, 40, 9, 9), (8, 40, 3, 3), {"padding": 1}),
    "few channels": (functional.conv2d, (2, 3, 9, 9), (8, 3, 3, 3), {"padding": 1}),
    "few outputs": (functional.conv2d, (2, 3, 16, 17), (6, 3, 5, 2), {"padding": (2, 0)}),
    "few outputs, small kernel": (functional.conv2d, (2, 3, 18, 19), (6, 3, 3, 2), {}),
    "more padding than reach": (functional.conv2d, (2, 40, 6, 6), (3, 40, 2, 2), {"padding": 3}),
    "stride, dilation and groups": (
        functional.conv2d,
        (2, 4, 11, 12),
        (6, 2, 3, 2),
        {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1), "groups": 2},
    ),
    "dilation along rows": (functional.conv2d, (2, 4, 11, 12), (6, 2, 3, 3), {"dilation": (1, 2), "groups": 2}),
    "stride along rows": (functional.conv2d, (2, 3, 10, 13), (4, 3, 3, 3), {"stride": (1, 3), "padding": 1}),
    "one place of the kernel": (functional.conv2d, (2, 5, 9, 9), (4, 5, 1, 1), {}),
    "one place, stride": (functional.conv2d, (2, 5, 9, 10), (4, 5, 1, 1), {"stride": 2}),
    "few places": (functional.conv2d, (3, 6, 2, 2), (5, 6, 3, 3), {"padding": 1}),
    "few places, stride": (functional.conv2d, (3, 6, 4, 4), (5, 6, 3, 3), {"padding": 1, "stride": 2}),
    "depthwise, dense": (functional.conv2d, (2, 6, 4, 4), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    "depthwise, dense, stride": (functional.conv2d, (2, 3, 5, 5), (6, 1, 3, 3), {"stride": 2, "groups": 3}),
    "depthwise, side by side": (functional.conv2d, (8, 4, 8, 7), (4, 1, 3, 3), {"padding": 1, "groups": 4}),
    "depthwise, large kernel": (functional.conv2d, (2, 3, 12, 12), (3, 1, 7, 7), {"padding": 3, "groups": 3}),
    "depthwise, large kernel, side by side": (
        functional.conv2d,
        (8, 3, 12, 12),
        (3, 1, 7, 7),
        {"padding": 3, "groups": 3},
    ),
    "depthwise, by rows": (functional.conv2d, (2, 4, 13, 12), (8, 1, 3, 3), {"padding": 1, "groups": 4, "stride": 2}),
    "depthwise, one dimension": (functional.conv1d, (2, 4, 150), (4, 1, 5), {"padding": 2, "groups": 4}),
    "transposed": (
        functional.conv_transpose2d,
        (2, 4, 5, 6),
        (4, 3, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    "transposed, groups": (functional.conv_transpose1d, (2, 4, 7), (4, 2, 3), {"stride": 3, "groups": 2}),
    "transposed, depthwise": (functional.conv_transpose2d, (2, 4, 4, 4), (4, 1, 2, 2), {"stride": 2, "groups": 4}),
}


def make_step(name: str) -> tuple[Step, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A convolution and its gradients, its arguments, and its results in double precision."""
    convolve, input_shape, weight_shape, settings = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(shape, generator=generator) for shape in (input_shape, weight_shape))
    transposed = "transposed" in name
    outputs = weight_shape[1] * settings.get("groups", 1) if transposed else weight_shape[0]
    bias = torch.randn(outputs, generator=generator)
    directions = torch.randn(convolve(inputs, weight, bias, **settings).shape, generator=generator)

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        *differentiated, along = arguments
        leaves = [tensor.detach().requires_grad_() for tensor in differentiated]
        with torch.enable_grad():
            output = convolve(*leaves, **settings)
            gradients = torch.autograd.grad((output * along).sum(), leaves)
        return output.detach(), *gradients

    arguments = (inputs, weight, bias, directions)
    exact = run(*(tensor.double() for tensor in arguments))
    step = Step(run=run, reference=run, inputs=_values("in", arguments), outputs=_values("out", exact))
    return step, arguments, exact


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_and_its_gradients(name: str) -> None:
    step, arguments, exact = make_step(name)
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    results = OnnxTarget().run(body, {value.name: tensor for value, tensor in zip(step.inputs, arguments, strict=True)})
    for actual, expected in zip(results, exact, strict=True):
        torch.testing.assert_close(actual, expected.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if "large kernel" in name])
def test_a_large_depthwise_kernel_takes_no_matrix_of_all_places(name: str) -> None:
    step, _, _ = make_step(name)
    sizes = [node.meta["val"].numel() for node in trace(step, OnnxTarget.lowerings).graph.nodes if "val" in node.meta]
    assert max(sizes) < (12 * 12) ** 2


def test_the_weight_gradient_copies_rows_of_all_channels() -> None:
    step, _, _ = make_step("few channels")
    nodes = [node for node in trace(step, OnnxTarget.lowerings).graph.nodes if "convolution" in str(node.target)]
    assert [node.args[0].meta["val"].shape for node in nodes][-1] == (1, 2, 11, 11 * 3)


def test_rows_of_few_outputs_are_outputs_of_their_own() -> None:
    forward, _, backward = _list_weights("few outputs")
    assert (forward, backward) == ((6 * 4, 3, 5 + 3, 2), (6 * 4, 2, 16 // 4, 16))
    forward, _, backward = _list_weights("few outputs, small kernel")
    assert (forward, backward) == ((6, 3, 3, 2), (6 * 4, 2, 16 // 4, 18))


def _list_weights(name: str) -> list[tuple[int, ...]]:
    """The shapes of the weights of the convolutions that compute a convolution and its gradients."""
    nodes = trace(make_step(name)[0], OnnxTarget.lowerings).graph.nodes
    return [tuple(node.args[1].meta["val"].shape) for node in nodes if "convolution" in str(node.target)]


def _values(prefix: str, tensors: tuple[Tensor, ...]) -> tuple[ValueInfo, ...]:
    return tuple(
        ValueInfo(name=f"{prefix}{index}", dtype="F32", shape=tuple(tensor.shape), role="input")
        for index, tensor in enumerate(tensors)
    )
