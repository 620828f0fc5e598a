"""Removing transpositions does not change results, and none are left between convolutions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from subfleet.export.layouts import settle_layouts
from subfleet.export.layouts.transpositions import reshape_order
from subfleet.export.lowerings.convolution_products import CONVOLUTIONS_AS_PRODUCTS
from subfleet.export.lowerings.tables import COMMON

aten = torch.ops.aten


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def graph_of(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.GraphModule:
    table = {**COMMON, **CONVOLUTIONS_AS_PRODUCTS}
    graph = make_fx(run, decomposition_table=table, tracing_mode="fake")(*inputs)
    for node in graph.graph.nodes:
        if node.target is aten._unsafe_view.default:
            node.target = aten.view.default
    return graph


def run_with_copies(graph: fx.GraphModule, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a graph with copies instead of views, as in a runtime without views."""
    for node in graph.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    graph.recompile()
    return graph(*inputs)  # type: ignore[no-any-return]


def count_copies(graph: fx.GraphModule) -> int:
    return sum(node.target is aten.permute.default for node in graph.graph.nodes)


X = random_tensor(2, 3, 4, 6)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise of two orders": lambda x: x.permute(0, 2, 3, 1).exp().permute(0, 3, 1, 2) + x,
    "a smaller operand": lambda x: x.permute(0, 2, 3, 1) * x[0, :, 0, 0] + x[0, 0, :, :1].reshape(4, 1, 1),
    "sum without the dimension": lambda x: x.permute(0, 2, 3, 1).sum((1, 2)),
    "mean with the dimension": lambda x: x.transpose(1, 3).mean((0, 1), keepdim=True) + x.transpose(1, 3),
    "maximum": lambda x: x.permute(3, 1, 0, 2).amax((1,)),
    "slices": lambda x: x.permute(0, 2, 3, 1)[:, 1:3, 2:, 0],
    "a last element": lambda x: x.transpose(1, 2)[:, -1],
    "padding": lambda x: functional.pad(x.permute(0, 2, 3, 1), (0, 1, 2, 3)),
    "concatenation of two orders": lambda x: torch.cat([x.transpose(2, 3), x.reshape(2, 3, 6, 4)], 1),
    "merged dimensions that stay": lambda x: x.permute(0, 2, 3, 1).reshape(2, 24, 3) * 2,
    "merged dimensions that do not": lambda x: x.permute(0, 3, 2, 1).reshape(2, 24, 3) * 2,
    "split dimensions": lambda x: x.permute(0, 2, 3, 1).reshape(2, 2, 2, 3, 2, 3).sum(2),
    "expanded": lambda x: x.permute(0, 2, 3, 1)[:1].expand(5, 4, 6, 3) * x[0, 0, 0, :5].reshape(5, 1, 1, 1),
    "an expanded result": lambda x: x.sum((2, 3), keepdim=True).expand(2, 3, 4, 6).permute(0, 2, 3, 1).reshape(48, 3),
    "a part of what is expanded": lambda x: x[:, :, :1].expand(2, 3, 4, 6)[:, :, 1:3].unsqueeze(1) * 2,
    "products of transposed": lambda x: x.reshape(24, 6).t() @ x.permute(0, 2, 3, 1).reshape(24, 6),
    "a product by transposed": lambda x: x.reshape(24, 6) @ x.reshape(24, 6).t(),
    "products of both transposed": lambda x: x.reshape(24, 6).t() @ x.reshape(6, 24).t(),
    "batches of products": lambda x: x.reshape(6, 4, 6).transpose(1, 2) @ x.permute(0, 1, 2, 3).reshape(6, 4, 6),
    "batches in another order": lambda x: x.permute(2, 0, 1, 3).reshape(4, 6, 6) @ x.permute(2, 3, 0, 1).reshape(4, 6, 6),  # noqa: E501
    "a product with a bias": lambda x: torch.addmm(x[0, 0, 0, :5], x.reshape(24, 6), x.reshape(24, 6)[:5].t()),
    "a number": lambda x: x.permute(1, 0, 2, 3).sum((0, 1, 2, 3)) * 2,
    "where": lambda x: torch.where(x.transpose(1, 2) > 0, x.transpose(1, 2), 0.5),
    "an operator that knows no order": lambda x: x.permute(0, 2, 3, 1).flip(1).cumsum(2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_numbers(name: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (FUNCTIONS[name](x.abs() + 0.5),)

    graph = settle_layouts(graph_of(run, X))
    (actual,), (expected,) = run_with_copies(graph, X), run(X)
    torch.testing.assert_close(actual, expected)
    results: Any = graph.graph.output_node().args[0]
    assert results[0].meta["val"].shape == expected.shape


def _convolutions(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    x = functional.conv2d(x, weights[0], padding=1)
    for weight in weights[1:]:
        normal = (x - x.mean((0, 2, 3), keepdim=True)) * x[:1, :, :1, :1]
        x = x + functional.conv2d(normal.relu(), weight, padding=1)
    return (x.mean((2, 3)),)


@pytest.mark.slow
def test_convolutions_in_a_row_are_not_turned_round() -> None:
    weights = [random_tensor(8, 8, 3, 3, seed=seed) / 6 for seed in range(3)]
    inputs = random_tensor(2, 8, 4, 4)
    graph = settle_layouts(graph_of(_convolutions, inputs, *weights))
    # Each weight once, and the input once: nothing between convolutions, and nothing after the last.
    assert count_copies(graph) == len(weights) + 1
    torch.testing.assert_close(run_with_copies(graph, inputs, *weights), _convolutions(inputs, *weights))


def test_every_result_has_memory_of_its_own() -> None:
    """Otherwise a runtime that writes results into the caller's memory would overwrite an input or another result."""
    graph = settle_layouts(graph_of(lambda x: (x.clone(), x.reshape(24, 6), x.exp(), x.exp().clone()), X))
    (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    assert isinstance(results, tuple)
    assert len(set(results)) == 4
    assert [isinstance(node, fx.Node) and node.target for node in results[:2]] == [aten.clone.default] * 2
    for expected, actual in zip((X, X.reshape(24, 6), X.exp(), X.exp()), run_with_copies(graph, X), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_transposition_is_shared_by_its_users() -> None:
    graph = settle_layouts(graph_of(lambda x: (x.t().cumsum(0), x.t().cumsum(1)), random_tensor(3, 4)))
    assert count_copies(graph) == 1


@pytest.mark.parametrize(
    ("old", "order", "new", "expected"),
    [
        ((2, 3, 4, 5), (0, 2, 3, 1), (2, 3, 20), (0, 2, 1)),
        ((2, 3, 4, 5), (0, 2, 3, 1), (6, 20), None),
        ((2, 3, 1, 1), (0, 2, 3, 1), (2, 3), (0, 1)),
        ((2, 6), (1, 0), (2, 3, 2), (1, 2, 0)),
        ((0, 2), (1, 0), (0,), None),
    ],
)
def test_which_reshapes_need_no_copy(
    old: tuple[int, ...], order: tuple[int, ...], new: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert reshape_order(old, order, new) == expected
