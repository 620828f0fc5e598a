"""Lowerings compared with the operators that they replace, in double precision."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from subfleet.export.lowerings.arithmetic import ACTIVATIONS
from subfleet.export.lowerings.convolution_products import CONVOLUTIONS_AS_PRODUCTS
from subfleet.export.lowerings.norms import NORMS

aten = torch.ops.aten
TABLES = {"products": CONVOLUTIONS_AS_PRODUCTS}
GEOMETRIES = [
    (sizes, kernel, stride, padding, dilation)
    for sizes, kernel, stride, padding, dilation in itertools.product(
        ((8, 8), (7, 9)), ((1, 1), (3, 3), (2, 3)), ([1, 1], [2, 2], [2, 1], [3, 2]), ([0, 0], [1, 1], [0, 1]), (1, 2)
    )
    if all(padding[i] <= dilation * (kernel[i] - 1) for i in range(2))
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(actual: Any, expected: Any) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert (result is None) == (reference is None)
        if result is not None:
            torch.testing.assert_close(result, reference)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_convolutions_of_every_geometry(table: str) -> None:
    for sizes, kernel, stride, padding, dilation in GEOMETRIES:
        inputs, weight, bias = draw(3, 4, *sizes), draw(5, 4, *kernel, seed=1), draw(5, seed=2)
        settings = (stride, padding, [dilation] * 2, False, [0, 0], 1)
        output = aten.convolution(inputs, weight, bias, *settings)
        gradient = draw(*output.shape, seed=3)
        forward = TABLES[table].get(aten.convolution.default, aten.convolution)
        backward = TABLES[table][aten.convolution_backward.default]

        assert_same([forward(inputs, weight, bias, *settings)], [output])
        for output_mask in ([True, True, True], [False, True, False]):
            expected = aten.convolution_backward(gradient, inputs, weight, [5], *settings, output_mask)
            assert_same(backward(gradient, inputs, weight, [5], *settings, output_mask), expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("sizes", [(), (5,), (3, 4)])
def test_group_norm(sizes: tuple[int, ...], groups: int, affine: bool) -> None:
    inputs = draw(3, 6, *sizes) + 2.0
    weight, bias = (draw(6, seed=1), draw(6, seed=2)) if affine else (None, None)
    counts = (3, 6, inputs[0, 0].numel(), groups)
    expected = aten.native_group_norm(inputs, weight, bias, *counts, 1e-5)

    assert_same(NORMS[aten.native_group_norm.default](inputs, weight, bias, *counts, 1e-5), expected)
    gradient = draw(*inputs.shape, seed=3)
    output_mask = [True, affine, affine]
    backward = (gradient, inputs, expected[1], expected[2], weight, *counts, output_mask)
    expected = aten.native_group_norm_backward(*backward)
    if not affine:
        expected = (expected[0], None, None)
    assert_same(NORMS[aten.native_group_norm_backward.default](*backward), expected)


@pytest.mark.parametrize("threshold", [0, 0.5])
def test_threshold_backward(threshold: float) -> None:
    output = torch.relu(draw(50))
    arguments = (draw(50, seed=1), output, threshold)
    assert_same([ACTIVATIONS[aten.threshold_backward.default](*arguments)], [aten.threshold_backward(*arguments)])


def test_log_softmax_backward() -> None:
    output = torch.log_softmax(draw(4, 7), 1)
    arguments = (draw(4, 7, seed=1), output, 1, torch.float64)
    lowered = ACTIVATIONS[aten._log_softmax_backward_data.default]
    assert_same([lowered(*arguments)], [aten._log_softmax_backward_data(*arguments)])
