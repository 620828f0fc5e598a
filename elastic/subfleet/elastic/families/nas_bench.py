"""NAS-Bench-201 networks: sections of cells described by a genotype, with residual blocks between them."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from subfleet.elastic.families.layers import Layers, SpatialMean
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.genotypes import (
    CONVOLUTIONS,
    LAST_NODE,
    Edge,
    edges_of,
    narrow_nodes,
)
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.sections import (
    BlockAxes,
    BlockPlan,
    MarkedSequence,
    build_sections,
    mark_blocks,
    plan_blocks,
)

_INNER = ("inner", "filtered")
"""The last part of the names of a block's inner axes."""


def nas_bench_201(config: NasBench201) -> nn.Module:
    """A stem, sections of cells, and a linear layer (Dong and Yang 2020, figure 1).

    Layers of a cell are ReLU, convolution and norm in this order. Edges that are not on a path from input to output are
    omitted, because they have no gradient. Nodes between convolutions only have an axis of their own in each cell.
    """
    plans = plan_blocks(
        config, strides=(1, *(2 for _ in config.widths[1:])), stem_width=config.widths[0], keeping="first"
    )
    edges, layers = edges_of(config.cell), Layers(config=config)
    widths = expand_to_blocks(config.hidden_widths or config.widths, config.depths)
    inner = {plan.name: width for plan, width in zip(plans, widths, strict=True)}

    def block(plan: BlockPlan) -> nn.Module:
        if plan.residual:
            return _build_cell(layers, edges, plan, inner[plan.name])
        return Reduction(layers, plan.width_in, inner[plan.name], plan.width)

    width_in, width = plans[0].width_in, plans[-1].width
    modules = OrderedDict[str, nn.Module](stem=layers.normed_layer((config.input_shape[0], width_in), 3))
    modules.update(build_sections(plans, block))
    modules.update(
        norm=layers.norm(width), relu=nn.ReLU(), pool=SpatialMean(), head=nn.Linear(width, config.class_count)
    )
    markers = mark_blocks(
        plans, partial(_list_axes, edges), stem="stem.conv", others={"head": "class"}, kinds={}, roles={}
    )
    return MarkedSequence(modules, markers)


def _list_axes(edges: tuple[Edge, ...], plan: BlockPlan) -> BlockAxes:
    if not plan.residual:
        return BlockAxes(stream=("second.conv",), inner={"first.conv": "inner"})
    narrow = _name_nodes(edges)
    into = {edge.name: edge.target for edge in edges if edge.convolves}
    return BlockAxes(
        stream=tuple(f"{name}.conv" for name, node in into.items() if node not in narrow),
        inner={f"{name}.conv": narrow[node] for name, node in into.items() if node in narrow},
    )


def _name_nodes(edges: tuple[Edge, ...]) -> dict[int, str]:
    """The last part of the name of the axis of each node with an axis of its own."""
    return {node: name for name, group in zip(_INNER, narrow_nodes(edges), strict=False) for node in group}


def _build_cell(layers: Layers, edges: tuple[Edge, ...], plan: BlockPlan, inner: int) -> "CellModule":
    narrow = _name_nodes(edges)

    def width(node: int) -> int:
        return inner if node in narrow else plan.width

    modules = OrderedDict[str, nn.Module]()
    for edge in edges:
        match edge.operation:
            case "skip_connect":
                modules[edge.name] = nn.Identity()
            case "avg_pool_3x3":
                modules[edge.name] = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
            case operation:
                widths = (width(edge.source), width(edge.target))
                modules[edge.name] = _make_active_layer(layers, widths, CONVOLUTIONS[operation])
    return CellModule(modules, edges)


def _make_active_layer(layers: Layers, widths: tuple[int, int], kernel: int, *, stride: int = 1) -> nn.Sequential:
    """ReLU, convolution and norm."""
    conv = layers.layer(*widths, kernel, stride=stride)
    return nn.Sequential(OrderedDict(activation=nn.ReLU(), conv=conv, norm=layers.norm(widths[1])))


class CellModule(nn.Module):
    """A cell: each node is the sum of its incoming edges, and the last node is the output.

    Args:
        modules: modules of the edges by name.
        edges: edges by target and source, each on a path from the first node to the last.
    """

    def __init__(self, modules: OrderedDict[str, nn.Module], edges: tuple[Edge, ...]) -> None:
        super().__init__()
        self.edges = edges
        for name, module in modules.items():
            self.add_module(name, module)

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
