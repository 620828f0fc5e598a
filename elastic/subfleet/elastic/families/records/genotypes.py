"""Genotypes of NAS-Bench-201 cells: one of five operations on each edge between four nodes.

Dong and Yang 2020, "NAS-Bench-201", section 2.1. A node is the sum of its incoming edges; the first is the input of the
cell, the last its output.
"""

import re
from dataclasses import dataclass

from subfleet.protocol.errors import ConfigError

LAST_NODE = 3
CONVOLUTIONS = {"nor_conv_1x1": 1, "nor_conv_3x3": 3}
"""Operations of ReLU, a convolution with this kernel side, and a norm."""
_OPERATIONS = ("none", "skip_connect", *CONVOLUTIONS, "avg_pool_3x3")
STAND_IN = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|nor_conv_3x3~2|"
"""The default. FedTrans (Zhu et al. 2024) starts with a cell of the benchmark that the paper does not name. This one
replaces it, because FedScale's tests of a transformed model start with it. It is residual, so a cell can be inserted as
the identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An edge that contributes to the output of a cell.

    Attributes:
        source: its input node, from 0.
        target: the node that it adds to, up to 3.
        operation: "skip_connect", "nor_conv_1x1", "nor_conv_3x3" or "avg_pool_3x3".
    """

    source: int
    target: int
    operation: str

    @property
    def name(self) -> str:
        """Name of its module."""
        return f"edge{self.source}{self.target}"

    @property
    def convolves(self) -> bool:
        """Whether it has weights."""
        return self.operation in CONVOLUTIONS


def edges_of(genotype: str) -> tuple[Edge, ...]:
    """The edges on a path from the first node to the last, by target and source.

    Args:
        genotype: in the benchmark's notation: `|op~0|+|op~0|op~1|+|op~0|op~1|op~2|`.

    Raises:
        ConfigError: the genotype is invalid, or no path leads from the first node to the last.
    """
    edges = [
        Edge(source=source, target=target, operation=operation)
        for target, operations in enumerate(_nodes(genotype), start=1)
        for source, operation in enumerate(operations)
        if operation != "none"
    ]
    reachable, used = {0}, {LAST_NODE}
    for edge in edges:
        reachable |= {edge.target} if edge.source in reachable else set()
    for edge in reversed(edges):
        used |= {edge.source} if edge.target in used else set()
    active = tuple(edge for edge in edges if edge.source in reachable and edge.target in used)
    if not any(edge.target == LAST_NODE for edge in active):
        raise ConfigError(
            f"the output of cell {genotype!r} does not depend on its input; choose a cell with a path from node 0 to "
            f"node {LAST_NODE}"
        )
    return active


def narrow_nodes(edges: tuple[Edge, ...]) -> tuple[frozenset[int], ...]:
    """The inner nodes that may have a width of their own, because only convolutions lead to and from them.

    Returns:
        Groups of nodes with a common width, because other edges connect them, by their first node.
    """
    groups = [frozenset({node}) for node in sorted({0, *(edge.target for edge in edges)})]
    for edge in edges:
        if not edge.convolves:
            ends = [group for group in groups if group & {edge.source, edge.target}]
            groups = [frozenset().union(*ends), *(group for group in groups if group not in ends)]
    return tuple(sorted((group for group in groups if not group & {0, LAST_NODE}), key=min))


def _nodes(genotype: str) -> list[list[str]]:
    nodes: list[list[str]] = []
    for target, text in enumerate(genotype.split("+"), start=1):
        edges = [re.fullmatch(rf"(\w+)~{source}", edge) for source, edge in enumerate(text.strip("|").split("|"))]
        operations = [edge[1] for edge in edges if edge and edge[1] in _OPERATIONS]
        if len(operations) != target or len(edges) != target:
            nodes.clear()
            break
        nodes.append(operations)
    if len(nodes) != LAST_NODE:
        raise ConfigError(
            f"cell is {genotype!r}, but must be written like {STAND_IN!r}, with one of {', '.join(_OPERATIONS)} for "
            "each pair of nodes"
        )
    return nodes
