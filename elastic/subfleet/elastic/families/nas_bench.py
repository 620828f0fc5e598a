"""NAS-Bench-201 networks: sections of cells described by a genotype, with residual blocks between them."""

from collections import OrderedDict

from torch import Tensor, nn

from subfleet.elastic.families.layers import Layers, SpatialMean
from subfleet.elastic.families.records.genotypes import (
    CONVOLUTIONS,
    LAST_NODE,
    Edge,
    edges_of,
    narrow_nodes,
)
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks
from subfleet.elastic.recording.markers import Markers

_INNER = ("inner", "filtered")
"""The names of a block's inner axes."""


def nas_bench_201(config: NasBench201) -> nn.Module:
    """A stem, sections of cells, and a linear layer (Dong and Yang 2020, figure 1).

    Layers of a cell are ReLU, convolution and norm in this order. Edges that are not on a path from input to output are
    omitted, because they have no gradient. Nodes between convolutions only have an axis of their own in each cell.
    """
    edges, layers = edges_of(config.cell), Layers(config=config)
    plans = plan_blocks(config, halving=True, keeping="first")

    def make(plan: BlockPlan) -> nn.Module:
        inner = plan.hidden or plan.width
        if plan.keeps:
            return CellModule(layers, plan.width, inner, edges)
        return Reduction(layers, plan.width_in, inner, plan.width)

    width = plans[-1].width
    stem = layers.normed_layer((config.input_shape[0], config.widths[0]), 3)
    modules = OrderedDict[str, nn.Module](stem=stem, **build_sections(plans, make))
    modules.update(
        norm=layers.norm(width), relu=nn.ReLU(), pool=SpatialMean(), head=nn.Linear(width, config.class_count)
    )
    return SectionedNetwork(modules, plans)


def _build_edge(layers: Layers, edge: Edge, widths: tuple[int, int]) -> nn.Module:
    match edge.operation:
        case "skip_connect":
            return nn.Identity()
        case "avg_pool_3x3":
            return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        case operation:
            return _make_active_layer(layers, widths, CONVOLUTIONS[operation])


def _make_active_layer(layers: Layers, widths: tuple[int, int], kernel: int, *, stride: int = 1) -> nn.Sequential:
    """ReLU, convolution and norm."""
    conv = layers.layer(*widths, kernel, stride=stride)
    return nn.Sequential(OrderedDict(activation=nn.ReLU(), conv=conv, norm=layers.norm(widths[1])))


class CellModule(nn.Module):
    """A cell: each node is the sum of its incoming edges, and the last node is the output.

    Args:
        layers: creates its layers.
        width: channels of its input and output.
        inner: channels of nodes with an axis of their own.
        edges: edges by target and source, each on a path from the first node to the last.
    """

    def __init__(self, layers: Layers, width: int, inner: int, edges: tuple[Edge, ...]) -> None:
        super().__init__()
        self.edges = edges
        own = {node: axis for axis, group in zip(_INNER, narrow_nodes(edges), strict=False) for node in group}
        for edge in edges:
            width_in, width_out = (inner if node in own else width for node in (edge.source, edge.target))
            self.add_module(edge.name, _build_edge(layers, edge, (width_in, width_out)))
        into = {edge.name: own[edge.target] for edge in edges if edge.convolves and edge.target in own}
        self.markers = Markers(axes={(f"{name}.conv.weight", 0): (axis,) for name, axis in into.items()})

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        nodes = {0: x}
        for edge in self.edges:
            output: Tensor = self.get_submodule(edge.name)(nodes[edge.source])
            nodes[edge.target] = nodes[edge.target] + output if edge.target in nodes else output
        return nodes[LAST_NODE]


class Reduction(nn.Module):
    """A residual block that halves the image and changes the channels (Dong and Yang 2020, section 2.1).

    Args:
        layers: creates its layers.
        width_in: input channels.
        inner: channels inside.
        width: output channels.
    """

    markers = Markers(axes={("first.conv.weight", 0): _INNER[:1]})

    def __init__(self, layers: Layers, width_in: int, inner: int, width: int) -> None:
        super().__init__()
        self.first = _make_active_layer(layers, (width_in, inner), 3, stride=2)
        self.second = _make_active_layer(layers, (inner, width), 3)
        self.shortcut = nn.Sequential(OrderedDict(pool=nn.AvgPool2d(2), conv=layers.layer(width_in, width)))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels in, height, width) to (batch, channels, height / 2, width / 2); both sides are even."""
        shortcut: Tensor = self.shortcut(x)
        added: Tensor = self.second(self.first(x))
        return shortcut + added
