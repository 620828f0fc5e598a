"""Lowerings of activations, norms, pooling, shapes and arithmetic compared with PyTorch in double precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.export.lowerings.arithmetic import ACTIVATIONS, ARITHMETIC
from subfleet.export.lowerings.indexing import INDEXING
from subfleet.export.lowerings.norms import NORMS
from subfleet.export.lowerings.pooling import AVERAGE_POOLS, MAXIMUM_POOL_BACKWARD, MAXIMUM_POOLS
from subfleet.export.lowerings.separable import RESAMPLINGS
from subfleet.export.lowerings.shaping import SHAPING
from subfleet.export.lowerings.tables import COMMON, remove_operators
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0


def tied(*shape: int, seed: int = 0) -> Tensor:
    """Few different values, so that there are equal maxima."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def assert_lowered(table: Any, operator: Any, *arguments: Any, **options: Any) -> None:
    expected, actual = operator(*arguments, **options), table[operator](*arguments, **options)
    pairs = [(actual, expected)] if isinstance(expected, Tensor) else zip(actual, expected, strict=True)
    for result, reference in pairs:
        if reference is None or result is None:
            assert result is reference or reference is None or reference.numel() == 0
            continue
        torch.testing.assert_close(result, reference)


X, G = draw(4, 6), draw(4, 6, seed=1)
BOUNDS = torch.tensor([0.0, 6.0, 3.0], dtype=torch.float64).repeat(4, 2)
IMAGE = draw(2, 4, 5, 6)

BACKWARDS: dict[str, tuple[Any, ...]] = {
    "threshold": (aten.threshold_backward.default, G, torch.relu(X), 0),
    "threshold, not 0": (aten.threshold_backward.default, G, X, 0.5),
    "hardtanh": (aten.hardtanh_backward.default, G, X, -1.0, 1.0),
    "relu6": (aten.hardtanh_backward.default, G, X * 4, 0.0, 6.0),
    "relu6 on its bounds": (aten.hardtanh_backward.default, G, BOUNDS, 0.0, 6.0),
    "hardsigmoid": (aten.hardsigmoid_backward.default, G, X * 2),
    "hardswish": (aten.hardswish_backward.default, G, X * 2),
    "silu": (aten.silu_backward.default, G, X),
    "gelu": (aten.gelu_backward.default, G, X),
    "sigmoid": (aten.sigmoid_backward.default, G, torch.sigmoid(X)),
    "tanh": (aten.tanh_backward.default, G, torch.tanh(X)),
    "leaky relu": (aten.leaky_relu_backward.default, G, X, 0.1, False),
    "hardshrink": (aten.hardshrink_backward.default, G, X, 0.5),
    "softshrink": (aten.softshrink_backward.default, G, X, 0.5),
    "softmax": (aten._softmax_backward_data.default, G, torch.softmax(X, 1), 1, torch.float64),
    "log softmax": (aten._log_softmax_backward_data.default, G, torch.log_softmax(X, 0), 0, torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_of_activations(name: str) -> None:
    assert_lowered(ACTIVATIONS, *BACKWARDS[name])


@pytest.mark.parametrize("operator", [aten.hardsigmoid, aten.hardswish, aten.silu, aten.gelu, aten.hardtanh])
def test_activations(operator: Any) -> None:
    assert_lowered(ACTIVATIONS, operator.default, X * 2)


def test_gelu_by_tanh() -> None:
    assert_lowered(ACTIVATIONS, aten.gelu.default, X, approximate="tanh")
    assert_lowered(ACTIVATIONS, aten.gelu_backward.default, G, X, approximate="tanh")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("features", [[6], [5, 6]])
def test_layer_norm(features: list[int], affine: bool) -> None:
    weight, bias = (draw(*features, seed=1), draw(*features, seed=2)) if affine else (None, None)
    assert_lowered(NORMS, aten.native_layer_norm.default, IMAGE, features, weight, bias, 1e-5)
    _, mean, rstd = aten.native_layer_norm(IMAGE, features, weight, bias, 1e-5)
    arguments = (draw(*IMAGE.shape, seed=3), IMAGE, features, mean, rstd, weight, bias, [True, affine, affine])
    assert_lowered(NORMS, aten.native_layer_norm_backward.default, *arguments)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool, affine: bool) -> None:
    weight, bias = (draw(4, seed=1), draw(4, seed=2)) if affine else (None, None)
    mean, variance = (None, None) if training else (draw(4, seed=3), draw(4, seed=4).abs())
    forward = (IMAGE, weight, bias, mean, variance, training, 0.1, 1e-5)
    assert_lowered(NORMS, aten.native_batch_norm.default, *forward)
    _, saved_mean, saved_rstd = aten.native_batch_norm(*forward)
    for output_mask in ([True, affine, affine], [True, False, False]):
        backward = (draw(*IMAGE.shape, seed=5), IMAGE, weight, mean, variance, saved_mean, saved_rstd, training, 1e-5)
        assert_lowered(NORMS, aten.native_batch_norm_backward.default, *backward, output_mask)


def test_a_normalisation_that_changes_its_statistics_is_refused() -> None:
    with pytest.raises(ExportError, match="running statistics inside an operator"):
        NORMS[aten.native_batch_norm.default](IMAGE, None, None, draw(4), draw(4), True, 0.1, 1e-5)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim: int) -> None:
    direction, length = (
        draw(3, 4, 5),
        draw(*(size if position == dim else 1 for position, size in enumerate((3, 4, 5)))),
    )
    assert_lowered(NORMS, aten._weight_norm_interface.default, direction, length, dim)
    _, norms = aten._weight_norm_interface(direction, length, dim)
    backward = (draw(3, 4, 5, seed=1), direction, length, norms, dim)
    assert_lowered(NORMS, aten._weight_norm_interface_backward.default, *backward)


@pytest.mark.parametrize("padding_index", [-1, 0, 2])
def test_embedding_backward(padding_index: int) -> None:
    tokens = torch.tensor([[0, 2, 2], [1, 0, 2]])
    assert_lowered(INDEXING, aten.embedding_dense_backward.default, draw(2, 3, 4), tokens, 5, padding_index, False)


def test_an_embedding_scaled_by_frequency_is_refused() -> None:
    with pytest.raises(ExportError, match="scale_grad_by_freq"):
        INDEXING[aten.embedding_dense_backward.default](draw(1, 4), torch.tensor([0]), 5, -1, True)


GEOMETRY = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(3, 9))


@pytest.mark.slow
@examples(15)
@given(
    rows=GEOMETRY,
    columns=GEOMETRY,
    ceil_mode=st.booleans(),
    count_padding=st.booleans(),
    divisor=st.sampled_from([None, 3]),
)
def test_average_pools_of_every_geometry(
    rows: tuple[int, ...], columns: tuple[int, ...], ceil_mode: bool, count_padding: bool, divisor: int | None
) -> None:
    kernel, stride, padding, sizes = ([rows[i], columns[i]] for i in range(4))
    assume(all(2 * padding[i] <= kernel[i] <= sizes[i] for i in range(2)))
    arguments = (kernel, stride, padding, ceil_mode, count_padding, divisor)
    x = draw(2, 3, *sizes)
    assert_lowered(AVERAGE_POOLS, aten.avg_pool2d.default, x, *arguments)
    gradient = draw(*aten.avg_pool2d(x, *arguments).shape, seed=1)
    assert_lowered(AVERAGE_POOLS, aten.avg_pool2d_backward.default, gradient, x, *arguments)


@pytest.mark.slow
@examples(10)
@given(sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)), outputs=st.tuples(st.integers(1, 10), st.integers(1, 10)))
def test_adaptive_pools_of_every_size(sizes: tuple[int, int], outputs: tuple[int, int]) -> None:
    x, gradient = tied(2, 3, *sizes), draw(2, 3, *outputs, seed=1)
    assert_lowered(AVERAGE_POOLS, aten._adaptive_avg_pool2d.default, x, list(outputs))
    assert_lowered(AVERAGE_POOLS, aten._adaptive_avg_pool2d_backward.default, gradient, x)
    values, indices = MAXIMUM_POOLS[aten.adaptive_max_pool2d.default](x, list(outputs))
    expected, expected_indices = aten.adaptive_max_pool2d(x, list(outputs))
    torch.testing.assert_close(values, expected)
    actual = MAXIMUM_POOLS[aten.adaptive_max_pool2d_backward.default](gradient, x, indices)
    torch.testing.assert_close(actual, aten.adaptive_max_pool2d_backward(gradient, x, expected_indices))


@pytest.mark.parametrize("settings_of_pool", [([3], [2], [1]), ([2], [], [0]), ([3, 2], [1, 2], [1, 0], [1, 2])])
def test_maximum_pool_backward_with_equal_maxima(settings_of_pool: Any) -> None:
    x = tied(2, 3, 7, 8)
    kernel, stride, padding, *dilation = settings_of_pool
    arguments = (kernel, stride, padding, *(dilation or [[1]]), False)
    values, indices = aten.max_pool2d_with_indices(x, *arguments)
    gradient = draw(*values.shape)
    operator = aten.max_pool2d_with_indices_backward.default
    assert_lowered(MAXIMUM_POOL_BACKWARD, operator, gradient, x, *arguments, indices)


UPSAMPLINGS = [
    (aten.upsample_nearest2d, ([7, 12],)),
    (aten.upsample_nearest2d, ([10, 12], 2.0, 2.0)),
    (aten.upsample_bilinear2d, ([10, 12], False, 2.0, 2.0)),
    (aten.upsample_bilinear2d, ([8, 3], True)),
    (aten.upsample_bilinear2d, ([3, 13], False)),
]


@pytest.mark.parametrize(("operator", "arguments"), UPSAMPLINGS)
def test_upsampling(operator: Any, arguments: tuple[Any, ...]) -> None:
    assert_lowered(RESAMPLINGS, operator.default, IMAGE, *arguments)
    backward = getattr(aten, f"{operator.__name__}_backward")
    gradient = draw(2, 4, *arguments[0])
    assert_lowered(RESAMPLINGS, backward.default, gradient, arguments[0], list(IMAGE.shape), *arguments[1:])


@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_repeating_pads(kind: str) -> None:
    pads = [1, 2, 3, 0]
    assert_lowered(RESAMPLINGS, getattr(aten, f"{kind}_pad2d").default, IMAGE, pads)
    gradient = draw(2, 4, 8, 9)
    assert_lowered(RESAMPLINGS, getattr(aten, f"{kind}_pad2d_backward").default, gradient, IMAGE, pads)


SHAPES: dict[str, tuple[Any, ...]] = {
    "pad by less": (aten.constant_pad_nd.default, IMAGE, [-1, 2, 0, -2], 0.5),
    "select backward": (aten.select_backward.default, draw(2, 4, 6), [2, 4, 5, 6], 2, -2),
    "slice backward": (aten.slice_backward.default, draw(2, 4, 2, 6), [2, 4, 5, 6], 2, 1, 4, 2),
    "slice backward, the end": (aten.slice_backward.default, draw(2, 4, 3, 6), [2, 4, 5, 6], 2, -3, 9, 1),
    "slice backward, far apart": (aten.slice_backward.default, draw(2, 4, 5, 2), [2, 4, 5, 6], 3, 0, 6, 4),
    "split": (aten.split.Tensor, IMAGE, 2, 2),
    "split by sizes": (aten.split_with_sizes.default, IMAGE, [1, 3], 1),
    "unbind": (aten.unbind.int, IMAGE, -1),
    "stack": (aten.stack.default, [X, G], -1),
    "roll": (aten.roll.default, IMAGE, [2, -1], [2, 3]),
    "roll of all": (aten.roll.default, IMAGE, [5]),
    "tril": (aten.tril.default, IMAGE, -1),
    "triu": (aten.triu.default, IMAGE, 2),
    "concatenating with nothing": (aten.cat.default, [torch.zeros(0, dtype=torch.float64), IMAGE, IMAGE[:, :, :0]], 2),
    "concatenating one and nothing": (aten.cat.default, [torch.zeros(0, dtype=torch.float64), IMAGE], -2),
    "pixel shuffle": (aten.pixel_shuffle.default, IMAGE, 2),
    "pixel unshuffle": (aten.pixel_unshuffle.default, draw(2, 3, 4, 6), 2),
    "channel shuffle": (aten.channel_shuffle.default, IMAGE, 2),
    "ones like": (aten.ones_like.default, IMAGE),
    "squeeze": (aten.squeeze.default, draw(2, 1, 3, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    operator, *arguments = SHAPES[name]
    if SHAPING[operator](*arguments) is NotImplemented:
        pytest.fail(f"{name} is not lowered")
    assert_lowered(SHAPING, operator, *arguments)


def test_an_empty_tensor_is_of_its_shape_and_type() -> None:
    tensor = SHAPING[aten.empty.memory_format]([2, 3], dtype=torch.int64)
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.int64
    assert SHAPING[aten.new_empty.default](X, [5]).dtype == X.dtype


ARITHMETICS: dict[str, tuple[Any, ...]] = {
    **{f"power {power}": (aten.pow.Tensor_Scalar, X.abs() + 0.1, power) for power in (0, 1, 2, 3, 0.5, -0.5, -1, -2)},
    "variance": (aten.var.correction, IMAGE, [2, 3]),
    "deviation": (aten.std.correction, IMAGE, [1]),
    "variance and mean": (aten.var_mean.correction, IMAGE, [2, 3]),
    "norm": (aten.linalg_vector_norm.default, IMAGE, 2, [1]),
    "norm 1": (aten.linalg_vector_norm.default, IMAGE, 1, [1], True),
    "norm infinity": (aten.linalg_vector_norm.default, IMAGE, float("inf")),
    "norm 3": (aten.linalg_vector_norm.default, IMAGE, 3, [2, 3]),
    "logsumexp": (aten.logsumexp.default, IMAGE * 300, [1, 2]),
    "maximum": (aten.max.dim, tied(4, 6), 1),
    "minimum": (aten.min.dim, tied(4, 6), 0, True),
    "of all": (aten.max.default, IMAGE),
    "addcmul": (aten.addcmul.default, X, G, X),
    "addcdiv": (aten.addcdiv.default, X, G, X),
    "baddbmm": (aten.baddbmm.default, draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5)),
    "mv": (aten.mv.default, X, draw(6)),
    "dot": (aten.dot.default, draw(6), draw(6, seed=1)),
    "log1p": (aten.log1p.default, torch.tensor([1e-20, 1e-9, 0.0, 0.5, 1e6], dtype=torch.float64)),
    "expm1": (aten.expm1.default, torch.tensor([1e-20, -1e-9, 0.0, 0.5, -30.0], dtype=torch.float64)),
    "isnan": (aten.isnan.default, torch.tensor([1.0, float("nan")])),
    "sum": (aten.sum.default, IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", ARITHMETICS)
def test_arithmetic(name: str) -> None:
    assert_lowered(ARITHMETIC, *ARITHMETICS[name])


def test_log1p_and_expm1_keep_small_numbers() -> None:
    tiny = torch.tensor([1e-7, -3e-6], dtype=torch.float32)
    for operator in (aten.log1p.default, aten.expm1.default):
        torch.testing.assert_close(ARITHMETIC[operator](tiny), operator(tiny), rtol=1e-6, atol=0.0)


def test_operators_can_be_removed_from_a_table() -> None:
    lowering: Callable[..., Any] = COMMON[aten.silu.default]
    table = remove_operators(COMMON, aten.gelu.default)
    assert aten.gelu.default not in table
    assert table[aten.silu.default] is lowering
