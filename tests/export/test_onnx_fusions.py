"""Fusions of the ONNX writer compute the same as PyTorch, with the fused operators."""

from collections.abc import Callable, Sequence

import onnx
import pytest
import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace
from subfleet.protocol.programs import ValueInfo

pytestmark = pytest.mark.export


def write_and_run(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[list[str], tuple[Tensor, ...]]:
    """The operators of a function's program, and its results."""
    outputs = run(*inputs)
    step = Step(
        run=run,
        reference=run,
        inputs=tuple(_value(f"in{index}", tensor) for index, tensor in enumerate(inputs)),
        outputs=tuple(_value(f"out{index}", tensor) for index, tensor in enumerate(outputs)),
    )
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    operators = [node.op_type for node in onnx.load_from_string(body).graph.node]
    return operators, OnnxTarget().run(body, {f"in{index}": tensor for index, tensor in enumerate(inputs)})


def _value(name: str, tensor: Tensor) -> ValueInfo:
    return ValueInfo(name=name, dtype="F32", shape=tuple(tensor.shape), role="input")


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("scale_shape", [(1, 4, 1), (3, 4, 1)])
@pytest.mark.parametrize("offset_shape", [(1, 4, 1), (3, 4, 1)])
@pytest.mark.parametrize("subtract", [True, False])
def test_a_scale_and_an_offset_are_one_operator(
    scale_shape: tuple[int, ...], offset_shape: tuple[int, ...], *, subtract: bool
) -> None:
    x, scale, offset = random_tensor(3, 4, 9), random_tensor(*scale_shape) + 2.0, random_tensor(*offset_shape)

    def run(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        return (x * scale - offset if subtract else x * scale + offset,)

    operators, results = write_and_run(run, x, scale, offset)
    assert "BatchNormalization" in operators
    assert "Mul" not in operators
    assert_close(results, run(x, scale, offset))


@pytest.mark.parametrize(("shape", "dims"), [((4, 16, 64, 64), [0, 1, 2, 3]), ((2, 4, 256, 256), [0, -2, 3])])
@pytest.mark.parametrize("keep", [True, False])
def test_long_sums_round_little(shape: tuple[int, ...], dims: list[int], *, keep: bool) -> None:
    x = random_tensor(*shape)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (x.sum(dims, keepdim=keep),)

    operators, (result,) = write_and_run(run, x)
    assert operators == ["ReduceSum"] * 2
    exact = x.double().sum(dims, keepdim=keep)
    assert result.shape == exact.shape
    assert float((result - exact).abs().max() / x.double().square().sum(dims).sqrt().max()) < 1e-6


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_decayed_weight_of_one_row_is_no_scaled_channel(*, is_tensor: bool) -> None:
    """Positions of a transformer, (1, T, C), under AdamW: the weight times a number, minus a change of its shape."""
    weight, factor, change = (
        random_tensor(1, 4, 9),
        torch.tensor(0.9),
        random_tensor(1, 4, 9) if is_tensor else torch.tensor(0.1),
    )

    def run(weight: Tensor, factor: Tensor, change: Tensor) -> tuple[Tensor, ...]:
        return (weight * factor - change,)

    operators, results = write_and_run(run, weight, factor, change)
    assert operators == ["Mul", "Sub"]
    assert_close(results, run(weight, factor, change))


def test_a_product_that_is_a_result_too_is_not_fused_away() -> None:
    x, scale, offset = random_tensor(3, 4, 9), random_tensor(1, 4, 1), random_tensor(1, 4, 1)

    def run(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        product = x * scale
        return product, product + offset

    operators, results = write_and_run(run, x, scale, offset)
    assert operators.count("Mul") == 1
    assert_close(results, run(x, scale, offset))


@pytest.mark.parametrize(("slope", "start"), [(1e38, 0.0), (2.0**22, 0.0), (-(2.0**22), 6 * 2.0**22), (0.5, 0.25)])
def test_a_ramp_is_one_operator(slope: float, start: float) -> None:
    x = torch.cat([random_tensor(50), torch.tensor([0.0, 6.0, 5.9999995, 6.0000005, 1e-30, -1e-30])])

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.clamp(x * slope + start if start else x * slope, 0.0, 1.0),)

    operators, results = write_and_run(run, x)
    assert operators == ["HardSigmoid"]
    assert_close(results, run(x))


@pytest.mark.parametrize("amounts", [[1, 2], [1, 2, 0, 3]])
def test_zeros_around_a_convolution_are_its_padding(amounts: list[int]) -> None:
    x, weight = random_tensor(2, 3, 5, 6), random_tensor(4, 3, 2, 2)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        padded = torch.ops.aten.constant_pad_nd.default(x, amounts, 0.0)
        return (torch.nn.functional.conv2d(padded, weight, padding=(0, 1)),)

    operators, results = write_and_run(run, x, weight)
    assert operators == ["Conv"]
    assert_close(results, run(x, weight))


def test_a_result_that_is_read_again_is_not_copied() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.exp(x)
        return y, y * y, y, x

    operators, results = write_and_run(run, random_tensor(3))
    assert operators == ["Exp", "Mul", "Identity", "Identity"]
    assert_close(results, run(random_tensor(3)))


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_number_has_the_rank_of_a_tensor_whose_last_size_is_1(*, is_tensor: bool) -> None:
    x, factor = random_tensor(3, 4, 1, 1), torch.tensor(1.5)

    def run(x: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        return (x * (factor if is_tensor else 2.0) + (x - factor),)

    _, results = write_and_run(run, x, factor)
    assert_close(results, run(x, factor))
