"""Genotypes of NAS-Bench-201's cells: which of five operations lies on each edge between four nodes.

Dong and Yang 2020, "NAS-Bench-201", section 2.1. A node is the sum of what its edges give; the first is what the cell
reads, the last what it gives.
"""

import re
from dataclasses import dataclass

from subfleet.protocol.errors import ConfigError

LAST_NODE = 3
CONVOLUTIONS = {"nor_conv_1x1": 1, "nor_conv_3x3": 3}
"""ReLU, a convolution of that side, and a norm."""
_OPERATIONS = ("none", "skip_connect", *CONVOLUTIONS, "avg_pool_3x3")
STAND_IN = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|nor_conv_3x3~2|"
"""Where nothing else is asked for. FedTrans (Zhu et al. 2024) begins with a cell of the benchmark that its text does
not name. This one stands in for it, as FedScale's own tests of a transformed model begin with it. It adds to what it
reads, so that a cell can be inserted as the identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One edge of a cell that takes part in what the cell gives.

    Attributes:
        source: the node that it reads, from 0.
        target: the node that it adds to, up to 3.
        operation: what it does: "skip_connect", "nor_conv_1x1", "nor_conv_3x3" or "avg_pool_3x3".
    """

    source: int
    target: int
    operation: str

    @property
    def name(self) -> str:
        """That of its module."""
        return f"edge{self.source}{self.target}"

    @property
    def convolves(self) -> bool:
        """Whether it has weights."""
        return self.operation in CONVOLUTIONS


def edges_of(genotype: str) -> tuple[Edge, ...]:
    """The edges on a way from the first node to the last, by target and source.

    Args:
        genotype: as the benchmark writes it: `|op~0|+|op~0|op~1|+|op~0|op~1|op~2|`.

    Raises:
        ConfigError: it is none, or nothing that the cell reads comes to its end.
    """
    found = [
        Edge(source=source, target=target, operation=operation)
        for target, told in enumerate(_nodes(genotype), start=1)
        for source, operation in enumerate(told)
        if operation != "none"
    ]
    fed, heard = {0}, {LAST_NODE}
    for edge in found:
        fed |= {edge.target} if edge.source in fed else set()
    for edge in reversed(found):
        heard |= {edge.source} if edge.target in heard else set()
    living = tuple(edge for edge in found if edge.source in fed and edge.target in heard)
    if not any(edge.target == LAST_NODE for edge in living):
        raise ConfigError(f"cell {genotype!r} gives nothing of what it reads; choose one with a way from 0 to the end")
    return living


def narrow_nodes(edges: tuple[Edge, ...]) -> tuple[frozenset[int], ...]:
    """The nodes inside that may have a width of their own, as only convolutions lead to and from them.

    Returns:
        Groups of nodes that have one width, as anything else leads from one to the other, by their first.
    """
    groups = [frozenset({node}) for node in sorted({0, *(edge.target for edge in edges)})]
    for edge in edges:
        if not edge.convolves:
            ends = [group for group in groups if group & {edge.source, edge.target}]
            groups = [frozenset().union(*ends), *(group for group in groups if group not in ends)]
    return tuple(sorted((group for group in groups if not group & {0, LAST_NODE}), key=min))


def is_passing(edges: tuple[Edge, ...]) -> bool:
    """Whether a cell gives what it reads where the convolutions into its last node give nothing."""
    rest = tuple(edge for edge in edges if edge.target != LAST_NODE or not edge.convolves)
    node = LAST_NODE
    while node:
        into = [edge for edge in rest if edge.target == node]
        if len(into) != 1 or into[0].operation != "skip_connect":
            return False
        node = into[0].source
    return True


def _nodes(genotype: str) -> list[list[str]]:
    nodes: list[list[str]] = []
    for target, text in enumerate(genotype.split("+"), start=1):
        edges = [re.fullmatch(rf"(\w+)~{source}", one) for source, one in enumerate(text.strip("|").split("|"))]
        operations = [one[1] for one in edges if one and one[1] in _OPERATIONS]
        if len(operations) != target or len(edges) != target:
            nodes.clear()
            break
        nodes.append(operations)
    if len(nodes) != LAST_NODE:
        raise ConfigError(
            f"cell is {genotype!r}, but must be written as {STAND_IN!r}, with one of {', '.join(_OPERATIONS)} for each "
            "pair of nodes"
        )
    return nodes
