"""Lowerings of all convolutions compared with PyTorch in double precision, over many geometries."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.export.lowerings import depthwise, few_outputs, few_places
from subfleet.export.lowerings.convolution import CONVOLUTIONS_AS_CONVOLUTIONS

pytestmark = pytest.mark.slow

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and settings of one convolution."""

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    arguments: tuple[Any, ...]


@st.composite
def cases(draw: Any, *, depthwise: bool) -> Case:
    dims = draw(st.integers(1, 2))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    kernel, stride, dilation, padding = each(1, 4), each(1, 3), each(1, 2), each(0, 5)
    transposed = draw(st.booleans())
    groups = draw(st.sampled_from([2, 3, 40])) if depthwise else draw(st.integers(1, 2))
    depth_in, depth_out = (1, draw(st.integers(1, 2))) if depthwise else (draw(st.sampled_from([1, 2, 20, 40])), 3)
    output_padding = [draw(st.integers(0, max(stride[i], dilation[i]) - 1)) if transposed else 0 for i in range(dims)]
    reach = [dilation[i] * (kernel[i] - 1) for i in range(dims)]
    # An ordinary convolution needs an input as large as its kernel, a transposed one an output of 1 or more.
    least = [
        max(1, -((output_padding[i] + reach[i] - 2 * padding[i]) // stride[i]) + 1)
        if transposed
        else max(1, reach[i] + 1 - 2 * padding[i])
        for i in range(dims)
    ]
    sizes = [draw(st.integers(least[i], least[i] + 9)) for i in range(dims)]
    weight = (groups * depth_in, depth_out) if transposed else (groups * depth_out, depth_in)
    return Case(
        inputs=(draw(st.integers(1, 3)), groups * depth_in, *sizes),
        weight=(*weight, *kernel),
        arguments=(stride, padding, dilation, transposed, output_padding, groups),
    )


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(case: Case) -> None:
    inputs, weight = random_tensor(*case.inputs, seed=0), random_tensor(*case.weight, seed=1)
    expected = aten.convolution(inputs, weight, None, *case.arguments)
    lowered = CONVOLUTIONS_AS_CONVOLUTIONS[aten.convolution.default](inputs, weight, None, *case.arguments)
    if lowered is not NotImplemented:
        torch.testing.assert_close(lowered, expected)
    gradient = random_tensor(*expected.shape, seed=2)
    output_mask = [True, True, True]
    reference_gradients = aten.convolution_backward(
        gradient, inputs, weight, [expected.shape[1]], *case.arguments, output_mask
    )
    lowered_gradients = CONVOLUTIONS_AS_CONVOLUTIONS[aten.convolution_backward.default](
        gradient, inputs, weight, [expected.shape[1]], *case.arguments, output_mask
    )
    for actual, reference in zip(lowered_gradients, reference_gradients, strict=True):
        torch.testing.assert_close(actual, reference)


UNREACHED = Case(inputs=(1, 1, 1), weight=(1, 3, 1), arguments=([1], [0], [2], True, [1], 1))
"""A transposed convolution of one position with output padding that no input reaches."""


@examples(60)
@given(cases(depthwise=False))
@example(UNREACHED)
def test_a_convolution_of_any_geometry_has_pytorchs_gradients(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_places, "FEW_PLACES", 0)
        patch.setattr(few_places, "FEW_PLACES_BACK", 0)
        check(case)


@examples(50)
@given(
    st.integers(1, 9),
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(5, 14), st.integers(4, 7)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_convolution_of_few_outputs_has_pytorchs_gradients(
    outputs: int, kernel: tuple[int, int], sizes: tuple[int, int], padding: tuple[int, int]
) -> None:
    settings = ([1, 1], list(padding), [1, 1], False, [0, 0], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_outputs, "LEAST_PLACES", 0)
        check(Case(inputs=(2, 3, *sizes), weight=(outputs, 3, *kernel), arguments=settings))


@examples(50)
@given(cases(depthwise=False))
@example(UNREACHED)
def test_a_convolution_over_few_places_has_pytorchs_gradients(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_places, "FEW_PLACES", 100)
        patch.setattr(few_places, "FEW_PLACES_BACK", 100)
        patch.setattr(few_places, "FEW_INPUTS", 100)
        check(case)


@examples(60)
@given(cases(depthwise=True))
def test_a_depthwise_convolution_of_any_geometry_has_pytorchs_gradients(case: Case) -> None:
    check(case)


@examples(50)
@given(cases(depthwise=True))
def test_a_depthwise_convolution_over_many_places_has_pytorchs_gradients(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise, "FEW_PLACES", 0)
        patch.setattr(depthwise, "PLACES_PER_TAP", 0)
        check(case)


@examples(50)
@given(cases(depthwise=True))
def test_a_depthwise_convolution_with_samples_side_by_side_has_pytorchs_gradients(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise, "PLACES_PER_TAP", 0)
        patch.setattr(depthwise, "LEAST_SAMPLES", 1)
        check(case)
