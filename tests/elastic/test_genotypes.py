"""Cells of NAS-Bench-201: the edges in use, the nodes with their own width, and invalid genotypes."""

import itertools
from dataclasses import replace

import pytest
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.test_growing import shapes_of

from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.genotypes import STAND_IN, edges_of, narrow_nodes
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.growing import can_deepen, widen_cells
from subfleet.protocol.errors import ConfigError

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")


def format_genotype(operations: tuple[str, ...]) -> str:
    a, b, c, d, e, f = operations
    return f"|{a}~0|+|{b}~0|{c}~1|+|{d}~0|{e}~1|{f}~2|"


@pytest.mark.slow
def test_every_cell_of_the_benchmark_is_read_or_refused_without_a_path() -> None:
    """All 15,625 cells, against the paths from the first node to the last."""
    ends = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    paths = [((0, 3),), ((0, 1), (1, 3)), ((0, 2), (2, 3)), ((0, 1), (1, 2), (2, 3))]
    for operations in itertools.product(OPERATIONS, repeat=6):
        present = {pair: operation for pair, operation in zip(ends, operations, strict=True) if operation != "none"}
        used = {pair for path in paths if present.keys() >= set(path) for pair in path}
        if not used:
            with pytest.raises(ConfigError, match="does not depend on its input"):
                edges_of(format_genotype(operations))
            continue
        edges = edges_of(format_genotype(operations))
        assert {(edge.source, edge.target): edge.operation for edge in edges} == {pair: present[pair] for pair in used}
        assert all(before.target <= after.target for before, after in itertools.pairwise(edges))


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "skip_connect",
        "|skip_connect~0|",
        "|skip_connect~0|+|none~0|none~1|",
        "|skip_connect~1|+|none~0|none~1|+|none~0|none~1|skip_connect~2|",
        "|conv_5x5~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|",
        f"{STAND_IN}+|none~0|none~1|none~2|none~3|",
    ],
)
def test_invalid_genotypes_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="must be written like"):
        NasBench201(input_shape=(1, 4, 4), class_count=2, widths=(4,), depths=(1,), cell=wrong)


@pytest.mark.parametrize(
    ("genotype", "narrow", "passing"),
    [
        (STAND_IN, [{1}, {2}], True),
        ("|nor_conv_1x1~0|+|none~0|skip_connect~1|+|skip_connect~0|none~1|nor_conv_3x3~2|", [{1, 2}], True),
        ("|skip_connect~0|+|nor_conv_1x1~0|none~1|+|none~0|skip_connect~1|nor_conv_3x3~2|", [{2}], True),
        ("|skip_connect~0|+|nor_conv_1x1~0|none~1|+|skip_connect~0|skip_connect~1|nor_conv_3x3~2|", [{2}], False),
        ("|avg_pool_3x3~0|+|none~0|none~1|+|none~0|skip_connect~1|none~2|", [], False),
        ("|nor_conv_3x3~0|+|none~0|none~1|+|none~0|nor_conv_3x3~1|none~2|", [{1}], False),
    ],
)
def test_widths_and_identities_follow_from_the_edges(genotype: str, narrow: list[set[int]], passing: bool) -> None:
    edges = edges_of(genotype)
    assert [set(group) for group in narrow_nodes(edges)] == narrow
    config = NasBench201(input_shape=(1, 4, 4), class_count=2, widths=(4, 8), depths=(2, 2), cell=genotype)
    network = network_of(config)
    cells = {cell.name: cell for cell in network.cells}
    assert [len(cell.axes) for cell in cells.values()] == [len(narrow), len(narrow), 1, len(narrow)]
    assert {can_deepen(network, cell) for cell in cells.values()} == {passing}


def test_a_cell_becomes_wider_inside_alone() -> None:
    config = CONVOLUTIONAL["nas_bench_201"]
    grown = widen_cells(config, ["section0.block1", "section1.block0"], 2.0)
    assert isinstance(config, NasBench201)
    assert shapes_of(grown) == shapes_of(replace(config, hidden_widths=(3, 8, 10, 7, 6)))
