"""XNNPACK's operators and regions in ExecuTorch's runtime, compared with PyTorch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from subfleet.device_profiles import detect_packing_width
from subfleet.export.memory.executorch_plan import heap_growth
from subfleet.export.memory.heap import heap_bytes, measure_passing_bytes
from subfleet.export.steps import SampleSpec, training_step
from subfleet.export.targets.executorch import ExecutorchTarget
from subfleet.export.targets.executorch_program import lower_to_executorch
from subfleet.export.targets.xnnpack import delegating
from subfleet.export.targets.xnnpack.delegating import DelegateRegion, delegate, prepare, split_regions
from subfleet.export.targets.xnnpack.operators import OPERATORS, is_supported
from subfleet.export.tracing import trace
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]

aten = torch.ops.aten


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def graph_of(run: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    def run_as_tuple(*tensors: Tensor) -> tuple[Tensor, ...]:
        result = run(*tensors)
        return result if isinstance(result, tuple) else (result,)

    graph = make_fx(run_as_tuple, tracing_mode="fake")(*inputs)
    for node in graph.graph.nodes:
        if node.target is aten._unsafe_view.default:
            node.target = aten.view.default
    return graph


def run_delegated(graph: fx.GraphModule, *inputs: Tensor) -> tuple[Tensor, ...]:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(bytes(lower_to_executorch(delegate(graph), {}).buffer))
    method = program.load_method("forward")
    assert method is not None
    return tuple(result.clone() for result in method.execute(list(inputs)))


@pytest.mark.skipif(heap_bytes() is None, reason="this C library does not count its heap")
def test_constant_factors_are_packed_by_the_width_of_this_processors_kernels() -> None:
    """Compare the memory of programs that differ only in the rows of factors with one column."""
    rows, load_bytes = [], []
    for size in (100, 2_000):
        graph = delegate(graph_of(lambda x: x.sum(1), normal(1, size * size)))  # products with ones
        assert {columns for _, columns in graph.meta["packed"]} == {1}
        rows.append(sum(rows for rows, _ in graph.meta["packed"]))
        body = bytes(lower_to_executorch(graph, {}).buffer)
        argument = ValueInfo(name="x", dtype="F32", shape=(1, size * size), role="input")
        result = ValueInfo(name="y", dtype="F32", shape=(1,), role="loss")
        heap_growth(body, (argument,), (result,), arena_bytes=0)  # memory that only the first program takes
        growth = heap_growth(body, (argument,), (result,), arena_bytes=0)
        assert growth is not None
        load_bytes.append(growth.load_bytes)
    assert rows[1] - rows[0] > 1_000
    packed_bytes = load_bytes[1] - load_bytes[0]
    assert 2 ** round(math.log2(packed_bytes / (4 * (rows[1] - rows[0])))) == detect_packing_width()


@pytest.mark.skipif(measure_passing_bytes(lambda: np.ones(10**6).sum()) == 0, reason="this kernel keeps no peak")
def test_a_workspace_takes_more_while_it_grows() -> None:
    """The second region's workspace is twice as large as the first one's, which goes when the second one is there."""
    pytest.importorskip("subfleet_executorch")

    def run(x: Tensor) -> Tensor:
        first = torch.cumsum(((x + 1) * 2).relu(), 1)
        return ((torch.cat([first, first], 1) + 1) * 2).relu().sum(1)

    count = 2 * 10**6
    body = bytes(lower_to_executorch(delegate(graph_of(run, normal(1, count))), {}).buffer)
    argument = ValueInfo(name="x", dtype="F32", shape=(1, count), role="input")
    result = ValueInfo(name="y", dtype="F32", shape=(1,), role="loss")
    growth = heap_growth(body, (argument,), (result,), arena_bytes=0)
    assert growth is not None
    first_bytes = 4 * count
    assert growth.step_bytes == pytest.approx(2 * first_bytes, rel=0.1)
    assert growth.passing_bytes == pytest.approx(first_bytes, rel=0.1)


@pytest.mark.parametrize("most", [6, pytest.param(delegating.MOST_VALUES, marks=pytest.mark.long)])
def test_a_region_with_more_values_than_the_delegate_takes_is_split(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegating, "MOST_VALUES", most)
    given = [torch.full((2,), float(index)) for index in range(most // 2 + 10)]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value + value * values[0] for value in values)

    graph = graph_of(run, *given)
    regions = [part for part in split_regions(graph.graph, is_supported) if isinstance(part, DelegateRegion)]
    assert len(regions) > 1
    assert all(len(region.inputs) + len(region.outputs) <= most for region in regions)
    for actual, expected in zip(run_delegated(graph, *given), run(*given), strict=True):
        assert torch.equal(actual, expected)


def targets(graph: fx.GraphModule) -> set[Any]:
    prepare(graph)
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def _products(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    transposed = b.permute(0, 2, 1)
    first, second = (x[:1].view(4, 5) for x in (a, b))
    return (
        aten.bmm(a, transposed),
        aten.bmm(a.permute(0, 2, 1), b),
        aten.mm(first, second.permute(1, 0)),
        aten.mm(a[:1, :, :4].reshape(4, 4), first),
    )


A, B = normal(3, 4, 5), normal(3, 4, 5, seed=1)
POSITIVE = A.abs() + 0.1
FUNCTIONS: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "unary": (lambda x: (x.abs(), x.ceil(), x.cos(), x.exp(), x.floor(), -x, x.sigmoid(), x.sin(), x.tanh()), [A]),
    "unary of positive": (lambda x: (x.log(), x.rsqrt(), x.sqrt(), x.reciprocal()), [POSITIVE]),
    "activations": (
        lambda x: (x.relu(), x.sign(), x.clamp(-0.5, 0.3), x.clamp(min=0.1), x.clamp(max=0.2), aten.gelu(x)), [A]
    ),
    "hardswish and silu": (lambda x: (aten.hardswish(x * 3), aten.silu(x)), [A]),
    "powers": (lambda x: (x.pow(2), x.pow(3)), [A]),
    "erf": (aten.erf, [torch.tensor([0.0, 0.3, -2.0, 5.0, -9.0, 1e-12])]),
    "binary": (lambda a, b: (a + b, a - b, a * b, a / b, a.maximum(b), a.minimum(b)), [A, POSITIVE]),
    "broadcast": (lambda a, b: (a * b, a[:, :, :1] + a, a - b.sum((0,))), [A, normal(5)]),
    "a factor of the second": (lambda a, b: (aten.add(a, b, alpha=2), aten.sub(a, b, alpha=0.5)), [A, B]),
    "numbers": (lambda x: (x + 1, x * 2, x / 4, x - 3, aten.rsub(x, 1), 1 / x), [POSITIVE]),
    "a single number": (lambda x, r: (x * r, r * 2), [A, torch.tensor(0.5)]),
    "reshapes": (lambda x: (x.reshape(12, 5) * 1, x.permute(2, 0, 1) * 1, x[:, :1].expand(3, 2, 5) + 0), [A]),
    "slices": (lambda x: (x[1:, :, 2:4] * 1, x[:, -2:] * 1, torch.cat([x[:, :1], x], 1)), [A]),
    "six parts": (lambda x: torch.cat([x, x + 1, x + 2, x + 3, x + 4, x + 5], 2), [A]),
    "padding": (lambda x: (functional.pad(x, (1, 2, 0, 3), value=2.0), functional.pad(x, (-1, 2))), [A]),
    "sums": (lambda x: (x.sum((2,)), x.sum((1,)), x.sum((0,)), x.sum((0, 2)), x.sum((0, 1, 2))), [A]),
    "long sums": (lambda x: (x.sum((0,)), x.sum((1,)), x.mean((0, 1)), x.mean((0,), keepdim=True)), [normal(1100, 90)]),
    "very long rows": (lambda x: (x.sum((1,)), x.sum((0, 1)), x.mean((1,))), [normal(40, 2200)]),
    "means": (lambda x: (x.mean((2,)), x.mean((1,)), x.mean((0, 2), keepdim=True)), [A]),
    "maxima": (lambda x: (x.amax((2,)), x.amax((1,), keepdim=True)), [A]),
    "softmax": (lambda x: (aten._softmax(x, 2, False), aten._log_softmax(x * 30, 2, False)), [A]),
    "products": (_products, [A, B]),
    "linear": (lambda x, w, b: aten.addmm(b, x, w), [normal(6, 5), normal(5, 4), normal(4)]),
    "constants": (lambda x: (x + torch.zeros(5), torch.full((3, 2), 7.0)), [A]),
    "masks": (
        lambda a, b: tuple(
            compare(first, second).to(torch.float32)
            for compare in (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne)
            for first, second in ((a, b), (a, 0.0), (a, 1.0))
        ),
        [torch.tensor([0.0, 1.0, -2.0, 1.0, 1e-30]), torch.tensor([0.0, 2.0, -2.5, 1.0, 0.0])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name: str) -> None:
    run, inputs = FUNCTIONS[name]
    graph = graph_of(run, *inputs)
    assert all(is_supported(node) for node in graph.graph.nodes if _is_checked(node, graph)), "not on XNNPACK"
    expected = run(*inputs)
    actual = run_delegated(graph, *inputs)
    results = expected if isinstance(expected, tuple) else (expected,)
    assert len(actual) == len(results)
    for result, reference in zip(actual, results, strict=True):
        torch.testing.assert_close(result, reference, rtol=2e-6, atol=2e-5 if inputs[0].numel() > 1000 else 2e-6)


def _is_checked(node: fx.Node, graph: fx.GraphModule) -> bool:
    if node is next(iter(graph.graph.nodes)):
        prepare(graph)
    return node.op == "call_function"


def test_every_operator_is_run_by_these_tests() -> None:
    seen: set[Any] = set()
    for run, inputs in FUNCTIONS.values():
        seen |= targets(graph_of(run, *inputs))
    untested = set(OPERATORS) - seen
    # They share the rules of other operators: numbers as the second operand, and copies.
    assert {str(target) for target in untested} <= {
        "aten.add.Scalar", "aten.sub.Scalar", "aten.mul.Scalar", "aten.div.Scalar", "aten.clone.default",
        "aten._to_copy.default", "aten.scalar_tensor.default",
    }  # fmt: skip


def test_counts_are_exact() -> None:
    mask = (normal(37, 41) > 0).float()
    (count,) = run_delegated(graph_of(lambda x: x.sum((0, 1)), mask), mask)
    assert float(count) == float(mask.sum())


def test_sums_of_rows_round_little() -> None:
    x = normal(64, 1024)
    (sums,) = run_delegated(graph_of(lambda x: x.sum(1), x), x)
    assert float((sums - x.double().sum(1)).norm() / x.norm()) < 2.5e-7


def test_sums_of_columns_round_little() -> None:
    x = normal(12544, 32)
    (sums,) = run_delegated(graph_of(lambda x: x.sum(0), x), x)
    assert float((sums - x.double().sum(0)).norm() / x.norm()) < 2.5e-7


def test_operators_that_xnnpack_lacks_are_left_to_the_runtime() -> None:
    tokens, table = torch.tensor([[1, 0], [2, 2]]), normal(3, 4)

    def run(tokens: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        scores = aten.embedding(table, tokens) * 2
        return scores.exp(), scores.argmax(2)

    graph = graph_of(run, tokens, table)
    parts = split_regions(graph.graph, is_supported)
    assert [isinstance(part, DelegateRegion) for part in parts] == [False, True, False]
    for actual, expected in zip(run_delegated(graph, tokens, table), run(tokens, table), strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_input_and_one_value_twice_as_results() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        return x, doubled, doubled + 0.0, aten.clone(doubled)

    graph = graph_of(run, A)
    for actual, expected in zip(run_delegated(graph, A), run(A), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_program_calls_xnnpack() -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, stride=2),
        torch.nn.BatchNorm2d(3),
        torch.nn.ReLU6(),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 4),
    )
    step = training_step(
        module, SampleSpec(shape=(1, 6, 6)), batch_size=3, objective=ObjectiveSettings(), optimiser=OptimiserSettings()
    )
    target = ExecutorchTarget()
    body = target.write_training(trace(step, target.lowerings), step).body
    assert b"XnnpackBackend" in body
    example = step.example(torch.Generator().manual_seed(0))
    named = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    exact = step.run(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in example))
    for actual, expected in zip(target.run(body, named), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-5)
