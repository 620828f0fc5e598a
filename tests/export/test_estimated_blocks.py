"""Blocks of memory that calls of a program take and give back, and what estimates make of them."""

from itertools import chain

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.export.estimation.model import block_events
from subfleet.export.estimation.target_programs import TracedProgram, sum_bytes
from subfleet.export.memory.blocks import KernelCall, blocks_of, peak_bytes


def test_blocks_are_taken_and_given_back() -> None:
    calls = [
        KernelCall(inputs=("x",), outputs={"a": 8}),
        KernelCall(inputs=("a",), outputs={"b": 8}, shares=True),
        KernelCall(inputs=("b",), outputs={"c": 8}, overwrites=("b",), before_bytes=(3,), after_bytes=(4,)),
        KernelCall(inputs=("c", "x"), outputs={"y": 8}, overwrites=("c", "x")),
    ]
    blocks = blocks_of(calls, {"x", "y"})
    assert blocks == [
        [("a", 8)],
        [],
        [("2/<0", 3), ("2/>0", 4), ("2/<0", None), ("2/>0", None)],
        [("a", None)],
    ]
    assert peak_bytes(chain.from_iterable(blocks)) == 15


def test_only_the_last_reader_writes_over_what_it_reads() -> None:
    calls = [
        KernelCall(inputs=("x",), outputs={"a": 8}),
        KernelCall(inputs=("a",), outputs={"b": 8}, overwrites=("a",)),
        KernelCall(inputs=("a", "b"), outputs={"c": 8}, overwrites=("b",)),
        KernelCall(inputs=("c", "c"), outputs={"d": 8}, overwrites=("c",)),
        KernelCall(inputs=("d",), outputs={"y": 4}, overwrites=("d",)),
    ]
    assert blocks_of(calls, {"x"}) == [
        [("a", 8)],
        [("b", 8)],
        [("a", None)],
        [("d", 8), ("b", None)],
        [("y", 4), ("d", None), ("y", None)],
    ]


def test_values_that_outlive_a_part_of_a_program_are_counted_separately() -> None:
    calls = (
        KernelCall(inputs=("x",), outputs={"a": 8, "b": 4}),
        KernelCall(inputs=("b",), outputs={"c": 2}),
        KernelCall(inputs=("a", "c"), outputs={"y": 1}, part=1),
    )
    program = TracedProgram(calls=calls, names={"x": "x", "y": "y"}, base_bytes=0)
    within, beyond = block_events(program, [0, 0, 0])
    a, b, c = (("a", (8, 0, False, None)), ("b", (4, 0, False, None)), ("c", (2, 0, False, None)))
    assert within == [(*b, 1), (*b, -1)]
    assert beyond == [(*a, 1), (*c, 1), (*a, -1), (*c, -1)]


@pytest.mark.parametrize(
    ("dims", "count"),
    [([1], 6), ([-1], 6), ([0], 0), ([0, 1], 30), ([], 0)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_short_sums_over_last_dimensions_hold_ones_in_a_stripe(dims: list[int], count: int) -> None:
    graph = make_fx(lambda x: (torch.ops.aten.sum.dim_IntList(x, dims) if dims else torch.exp(x),))(torch.zeros(5, 6))
    (node,) = (candidate for candidate in graph.graph.nodes if candidate.op == "call_function")
    assert sum_bytes(node) == 4 * 16 * count
    node.all_input_nodes[0].meta["val"] = torch.empty(5, 1_025)
    assert sum_bytes(node) == 0
