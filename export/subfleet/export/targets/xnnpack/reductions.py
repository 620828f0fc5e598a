"""Sums, means and maxima in the forms that XNNPACK's delegate has.

It can compute the mean over the two middle dimensions of four, the maximum over windows, and products. Every reduction
is one or several of these.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.nodes import argument, shape_of
from subfleet.export.targets.xnnpack.graph import Rule, XnnpackGraph

aten = torch.ops.aten

LONGEST_PRODUCT = 1024
_FEW_NUMBERS = 1 << 16
"""Rows up to this length are summed by a product with ones; longer ones by a mean, which is slow for each row."""
_USUAL_COLUMN = 32
"""Longer columns are summed in parts of about this length, then the sums of the parts, and so on: XNNPACK adds a number
to the sum of those before. With two stages for 4 x 112 x 112 numbers, gradients of DenseNet were 3.5 times as far off
as those of PyTorch, which adds in double precision; now 2 times."""
_LONGEST_SUM = 512
"""Longer rows that are summed by means are summed in two stages."""
_LONGEST_ROW = 128
"""Likewise longer rows by products, which add one number after the other: at 1024, 5 times PyTorch's error."""


def _parts(length: int, longest: int = _LONGEST_SUM) -> int:
    """Return the number of equal parts of a long sum; 1 if it is short or does not divide."""
    if length <= longest:
        return 1
    root = math.isqrt(length)
    return next((parts for parts in range(root, 1, -1) if length % parts == 0), 1)


def list_row_products(length: int) -> tuple[int, ...]:
    """Return the lengths of the products with ones that sum a row of at most `LONGEST_PRODUCT` numbers."""
    parts = _parts(length, _LONGEST_ROW)
    return (length,) if parts == 1 else (*list_row_products(length // parts), *list_row_products(parts))


def _mean_of_columns(graph: XnnpackGraph, x_orc: int) -> int:
    """Reduce (outer, reduced, columns) to (outer, columns)."""
    outer, reduced, columns = graph.shape(x_orc)
    length = _part_of_column(reduced)
    parts = reduced // length
    means = graph.mean_over_middle(graph.reshape(x_orc, (outer * parts, length, 1, columns)))
    if parts == 1:
        return graph.reshape(means, (outer, columns))
    return _mean_of_columns(graph, graph.reshape(means, (outer, parts, columns)))


def _part_of_column(length: int) -> int:
    """Return the length of the equal parts in which a column is summed first."""
    if length <= _USUAL_COLUMN:
        return length
    divisors = [part for part in range(2, length + 1) if length % part == 0]
    return min(divisors, key=lambda part: abs(math.log(part / _USUAL_COLUMN)))


def _row_sums(graph: XnnpackGraph, x_rk: int, factor: float = 1.0) -> int:
    """Reduce (R, K) to (R, 1): the sum of each row, times a factor."""
    rows, length = graph.shape(x_rk)
    parts = _parts(length, _LONGEST_ROW)
    if length <= LONGEST_PRODUCT and parts == 1:
        return graph.product(x_rk, graph.constant(factor, (length, 1)))
    if parts > 1 and (length <= LONGEST_PRODUCT or rows * length <= _FEW_NUMBERS):
        # Exact for integers, unlike a mean that is multiplied again.
        sums = _row_sums(graph, graph.reshape(x_rk, (rows * parts, length // parts)))
        return _row_sums(graph, graph.reshape(sums, (rows, parts)), factor)
    parts = _parts(length)
    shaped = graph.reshape(x_rk, (rows * parts, length // parts, 1, 1))
    means = graph.reshape(graph.mean_over_middle(shaped), (rows, parts))
    if parts > 1:
        return graph.product(means, graph.constant(factor * length / parts, (parts, 1)))
    return graph.binary("Multiply", means, graph.constant(factor * length))


def _row_maxima(graph: XnnpackGraph, x_rk: int) -> int:
    """Reduce (R, K) to (R, 1)."""
    rows, length = graph.shape(x_rk)
    columns = graph.reshape(graph.transpose(x_rk, (1, 0)), (1, length, 1, rows))
    return graph.reshape(graph.maximum_over_rows(columns), (rows, 1))


def _runs(shape: Sequence[int], dims: Sequence[int]) -> list[tuple[bool, int]]:
    """Return the shape as runs of dimensions that are all reduced or all kept, with their sizes, without sizes of 1."""
    runs: list[tuple[bool, int]] = []
    for dim, size in enumerate(shape):
        reduced = dim in dims
        if size == 1:
            continue
        if runs and runs[-1][0] == reduced:
            runs[-1] = (reduced, runs[-1][1] * size)
        else:
            runs.append((reduced, size))
    return runs


def _reduce(graph: XnnpackGraph, node: fx.Node, *, mean: bool) -> int:
    x: Any = argument(node, 0)
    shape = shape_of(x)
    dims = [dim % len(shape) for dim in argument(node, 1)] if shape else []
    value = graph.value(x)
    factor = 1.0
    runs = _runs(shape, dims)
    # From the last run to the first: rows first, so that the rest is small.
    while any(reduced for reduced, _ in runs):
        index_of_run = max(index for index, (reduced, _) in enumerate(runs) if reduced)
        size = runs[index_of_run][1]
        outer = math.prod(length for _, length in runs[:index_of_run])
        inner = math.prod(length for _, length in runs[index_of_run + 1 :])
        if inner == 1:
            value = _row_sums(graph, graph.reshape(value, (outer, size)), 1.0 / size if mean else 1.0)
        else:
            value = _mean_of_columns(graph, graph.reshape(value, (outer, size, inner)))
            factor *= 1.0 if mean else size
        remaining = [run for index, run in enumerate(runs) if index != index_of_run]
        runs = _runs(
            [size for _, size in remaining], [index for index, (reduced, _) in enumerate(remaining) if reduced]
        )
    return graph.reshape(graph.scale(value, factor), shape_of(node))


def _maximum(graph: XnnpackGraph, node: fx.Node) -> int:
    x: Any = argument(node, 0)
    shape = shape_of(x)
    dim = argument(node, 1)[0] % len(shape)
    outer, length, inner = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    if inner == 1:
        maxima = _row_maxima(graph, graph.reshape(graph.value(x), (outer, length)))
    else:
        maxima = graph.maximum_over_rows(graph.reshape(graph.value(x), (outer, length, 1, inner)))
    return graph.reshape(maxima, shape_of(node))


def _log_softmax(graph: XnnpackGraph, node: fx.Node) -> int:
    x: Any = argument(node, 0)
    shape = shape_of(x)
    rows = graph.reshape(graph.value(x), (math.prod(shape[:-1]), shape[-1]))
    shifted = graph.binary("Subtract", rows, _row_maxima(graph, rows))
    logs = graph.unary("Log", _row_sums(graph, graph.unary("Exp", shifted)))
    return graph.reshape(graph.binary("Subtract", shifted, logs), shape)


def _softmax(graph: XnnpackGraph, node: fx.Node) -> int:
    return graph.unary("Softmax", graph.value(argument(node, 0)))


REDUCTIONS: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.sum.dim_IntList: partial(_reduce, mean=False),
        aten.mean.dim: partial(_reduce, mean=True),
        aten.amax.default: _maximum,
        aten._softmax.default: _softmax,  # noqa: SLF001 - the operator's name
        aten._log_softmax.default: _log_softmax,  # noqa: SLF001 - the operator's name
    }
)
