"""Convolutions as products with channels last, and Winograd's, compared with PyTorch in double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subfleet.export.lowerings import winograd
from subfleet.export.lowerings.convolution_products import CONVOLUTIONS_AS_PRODUCTS, PRODUCTS_WITH_BIAS
from subfleet.export.lowerings.taps import Taps
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(inputs: tuple[int, ...], weight: tuple[int, ...], *settings: Any) -> None:
    """Check forward and backward of one convolution with a bias."""
    x, w = random_tensor(*inputs), random_tensor(*weight, seed=1)
    transposed, groups = settings[3], settings[5]
    out_channels = weight[1] * groups if transposed else weight[0]
    bias = random_tensor(out_channels, seed=2)
    expected = aten.convolution(x, w, bias, *settings)
    actual = CONVOLUTIONS_AS_PRODUCTS[aten.convolution.default](x, w, bias, *settings)
    torch.testing.assert_close(actual, expected)
    assert actual.is_contiguous()
    arguments = (random_tensor(*expected.shape, seed=3), x, w, [out_channels], *settings)
    lowered = CONVOLUTIONS_AS_PRODUCTS[aten.convolution_backward.default]
    for output_mask in ([True, True, True], [False, True, False]):
        expected_gradients = aten.convolution_backward(*arguments, output_mask)
        for actual_gradient, expected_gradient, is_needed in zip(
            lowered(*arguments, output_mask), expected_gradients, output_mask, strict=True
        ):
            if is_needed:
                torch.testing.assert_close(actual_gradient, expected_gradient)
            else:
                assert actual_gradient is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "depth_in", "depth_out"), [(1, 2, 5), (1, 20, 3), (2, 3, 4), (6, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "sizes"),
    [
        ((3, 3), [1, 1], [1, 1], [1, 1], (6, 7)),
        ((3, 3), [2, 2], [1, 1], [1, 1], (8, 8)),
        ((3, 2), [2, 3], [0, 2], [2, 1], (9, 7)),
        ((1, 1), [2, 2], [0, 0], [1, 1], (5, 6)),
        ((5, 1), [1, 2], [3, 0], [1, 1], (4, 5)),
        ((4,), [3], [2], [2], (11,)),
        ((1,), [1], [0], [1], (3,)),
    ],
)
def test_convolutions_of_every_geometry(  # noqa: PLR0917 - one geometry
    kernel: tuple[int, ...],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    sizes: tuple[int, ...],
    groups: int,
    depth_in: int,
    depth_out: int,
    transposed: bool,
) -> None:
    outer = (groups * depth_in, depth_out) if transposed else (groups * depth_out, depth_in)
    output_padding = [min(1, step - 1) for step in stride] if transposed else [0] * len(stride)
    inputs = (2, groups * depth_in, *sizes)
    check(inputs, (*outer, *kernel), stride, padding, dilation, transposed, output_padding, groups)


def test_an_output_that_no_input_reaches() -> None:
    check((1, 1, 1), (1, 3, 1), [1], [0], [2], True, [1], 1)


def test_an_input_that_no_output_reaches() -> None:
    check((1, 2, 8, 8), (2, 2, 1, 1), [3, 3], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("sizes", "padding"), [((16, 16), 1), ((15, 17), 1), ((18, 16), 0), ((15, 13), 2)])
def test_winograd(sizes: tuple[int, int], padding: int, transposed: bool) -> None:
    taps = Taps(kernel=(3, 3), stride=(1, 1), padding=(padding, padding), dilation=(1, 1), groups=1)
    assert winograd.fits(taps, 13, 14, sizes, 8), "this test needs Winograd's algorithm"
    weight = (13, 14, 3, 3) if transposed else (14, 13, 3, 3)
    check((8, 13, *sizes), weight, [1, 1], [padding] * 2, [1, 1], transposed, [0, 0], 1)


def test_winograd_is_left_where_it_is_slower() -> None:
    taps = Taps(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    assert not winograd.fits(taps, 3, 64, (32, 32), 16)
    assert not winograd.fits(taps, 512, 512, (2, 2), 16)


def test_three_dimensions_are_refused() -> None:
    arguments = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    with pytest.raises(ExportError, match="3 dimensions cannot be lowered; use one in one or two"):
        CONVOLUTIONS_AS_PRODUCTS[aten.convolution.default](
            random_tensor(1, 1, 2, 2, 2), random_tensor(1, 1, 1, 1, 1), None, *arguments
        )


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0)])
def test_a_product_with_a_matrix_added(beta: float, alpha: float) -> None:
    bias, a, b = random_tensor(3, 4), random_tensor(3, 5, seed=1), random_tensor(5, 4, seed=2)
    actual = PRODUCTS_WITH_BIAS[aten.addmm.default](bias, a, b, beta=beta, alpha=alpha)
    torch.testing.assert_close(actual, torch.addmm(bias, a, b, beta=beta, alpha=alpha))
