"""Maximum pooling in ONNX, forward and backward, against PyTorch's kernels, on inputs full of equal elements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from onnx import helper
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.targets.onnx_operators import OPERATORS, Emitter

aten = torch.ops.aten
Pair = tuple[int, int]
Run = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Shape of the input and settings of a pool."""

    inputs: tuple[int, ...]
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil_mode: bool = False

    def pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices."""
        values, indices = aten.max_pool2d_with_indices(x, self.kernel, self.stride, self.padding, 1, self.ceil_mode)
        return values, indices

    def run(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Values, and the gradient of the input."""
        values, indices = self.pool(x)
        arguments = (self.kernel, self.stride, self.padding, [1, 1], self.ceil_mode)
        return values, aten.max_pool2d_with_indices_backward(gradient, x, *arguments, indices)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return Pool(
        inputs=tuple(draw(st.integers(1, 3)) for _ in range(2)) + tuple(draw(st.integers(3, 9)) for _ in range(2)),
        kernel=kernel,
        stride=draw(st.sampled_from([kernel, (1, 1), (3, 2)])),
        padding=draw(st.sampled_from([(0, 0), (kernel[0] // 2, kernel[1] // 2)])),
        ceil_mode=draw(st.booleans()),
    )


def compute_with_onnx(run: Run, inputs: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
    """The operators that are written, and what they compute."""
    # Tracing does not see that a method is bound.
    emitter, graph = Emitter(OPERATORS), make_fx(partial(run), tracing_mode="fake")(*inputs)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    for node in graph.graph.find_nodes(op="placeholder"):
        emitter.bind(node, node.name)
    results = emitter.translate(graph)[1]
    given_values = [helper.make_tensor_value_info(name, 1, x.shape) for name, x in zip(names, inputs, strict=True)]
    values = [helper.make_empty_tensor_value_info(name) for name in results]
    written = helper.make_graph(emitter.nodes, "pool", given_values, values, emitter.initializers)
    model = helper.make_model(written, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [node.op_type for node in emitter.nodes], [torch.from_numpy(value) for value in computed]


def draw_inputs(pool: Pool, seed: int) -> tuple[Tensor, Tensor]:
    """Samples with few different numbers, and gradients whose sums are exact."""
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.integers(-2, 2, pool.inputs).astype(np.float32))
    gradient = generator.integers(-9, 9, pool.pool(x)[0].shape).astype(np.float32)
    return x, torch.from_numpy(gradient)


@examples(60)
@given(pool=pools(), seed=st.integers(0, 2**16))
def test_values_and_gradients_are_those_of_pytorch(pool: Pool, seed: int) -> None:
    inputs = draw_inputs(pool, seed)
    for computed, expected in zip(compute_with_onnx(pool.run, inputs)[1], pool.run(*inputs), strict=True):
        assert torch.equal(computed, expected)


@pytest.mark.parametrize(
    ("pool", "finds_indices"),
    [
        (Pool(inputs=(2, 3, 8, 8), kernel=(2, 2), stride=(2, 2)), False),
        (Pool(inputs=(2, 3, 9, 7), kernel=(3, 2), stride=(3, 2)), False),
        (Pool(inputs=(2, 3, 8, 8), kernel=(3, 3), stride=(2, 2), padding=(1, 1)), True),
        (Pool(inputs=(2, 3, 7, 7), kernel=(2, 2), stride=(2, 2), ceil_mode=True), True),
    ],
)
def test_indices_are_found_only_where_windows_overlap_or_reach_beyond_the_input(
    pool: Pool, finds_indices: bool
) -> None:
    operators, _ = compute_with_onnx(pool.run, draw_inputs(pool, 0))
    assert ("ScatterElements" in operators) == finds_indices
    assert ("Resize" in operators) != finds_indices


def test_indices_that_another_operator_reads_are_found() -> None:
    pool = Pool(inputs=(2, 3, 8, 8), kernel=(2, 2), stride=(2, 2))

    def run(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = pool.pool(x)
        arguments = (pool.kernel, pool.stride, pool.padding, [1, 1], pool.ceil_mode)
        spread = aten.max_pool2d_with_indices_backward(gradient, x, *arguments, indices)
        return values, spread, torch.where(indices < 0, gradient, values)

    inputs = draw_inputs(pool, 0)
    for computed, expected in zip(compute_with_onnx(run, inputs)[1], run(*inputs), strict=True):
        assert torch.equal(computed, expected)
