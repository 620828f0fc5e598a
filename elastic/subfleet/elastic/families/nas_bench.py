"""NAS-Bench-201 networks: sections of cells described by a genotype, with residual blocks between them."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.layers import Layers, SpatialMean
from subfleet.elastic.families.records.blocks import expand_to_blocks
from subfleet.elastic.families.records.genotypes import (
    CONVOLUTIONS,
    LAST_NODE,
    Edge,
    edges_of,
    is_passing,
    narrow_nodes,
)
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.sections import (
    BlockPlan,
    build_sections,
    channel_axis,
    class_axis,
    plan_blocks,
    skippable,
    stream_axes,
)

_INNER = ("inner", "filtered")
"""The last part of the names of a block's inner axes."""


def nas_bench_201(config: NasBench201) -> Blueprint:
    """A stem, sections of cells, and a linear layer (Dong and Yang 2020, figure 1).

    Layers of a cell are ReLU, convolution and norm in this order. Edges that are not on a path from input to output are
    omitted, because they have no gradient. Nodes between convolutions only have an axis of their own in each cell.
    """
    plans = plan_blocks(
        config, strides=(1, *(2 for _ in config.widths[1:])), stem_width=config.widths[0], keeping="first"
    )
    edges = edges_of(config.cell)
    return Blueprint(
        axes=(*stream_axes(config, plans), *_inner_axes(config, edges, plans), class_axis(config)),
        blocks=skippable(plans),
        build=partial(_build, config, edges, plans),
        group_size=config.group_size,
        identities={name: "silent" for plan in plans for name in _closing(config, edges, plan)},
    )


def _closing(config: NasBench201, edges: tuple[Edge, ...], plan: BlockPlan) -> tuple[str, ...]:
    """The last weights of everything that an inserted cell adds; it is the identity if they are 0."""
    if not plan.position or not is_passing(edges):
        return ()
    norm = "norm.norm" if config.scaler else "norm"
    kind = "conv" if config.norm == "none" else norm
    return tuple(
        f"{plan.name}.{edge.name}.{kind}.weight" for edge in edges if edge.target == LAST_NODE and edge.convolves
    )


def _inner_axes(config: NasBench201, edges: tuple[Edge, ...], plans: tuple[BlockPlan, ...]) -> Iterator[Axis]:
    widths = expand_to_blocks(config.hidden_widths or config.widths, config.depths)
    for plan, width in zip(plans, widths, strict=True):
        names = _INNER[: len(narrow_nodes(edges))] if plan.residual else _INNER[:1]
        yield from (channel_axis(config, f"{plan.name}.{name}", width) for name in names)


def _build(config: NasBench201, edges: tuple[Edge, ...], plans: tuple[BlockPlan, ...], sizes: Sizes) -> nn.Module:
    layers = Layers(config=config)

    def block(plan: BlockPlan) -> nn.Module:
        if plan.residual:
            return _cell(layers, edges, plan, sizes)
        inner = sizes[f"{plan.name}.inner"]
        return Reduction(layers, sizes[plan.stream_in], inner, sizes[plan.stream])

    width_in, width = sizes[plans[0].stream], sizes[plans[-1].stream]
    modules = OrderedDict[str, nn.Module](stem=layers.normed_layer((config.input_shape[0], width_in), 3))
    modules.update(build_sections(plans, sizes, block))
    modules.update(norm=layers.norm(width), relu=nn.ReLU(), pool=SpatialMean(), head=nn.Linear(width, sizes["class"]))
    return nn.Sequential(modules)


def _cell(layers: Layers, edges: tuple[Edge, ...], plan: BlockPlan, sizes: Sizes) -> "CellModule":
    narrow = {node: name for name, group in zip(_INNER, narrow_nodes(edges), strict=False) for node in group}

    def width(node: int) -> int:
        return sizes[f"{plan.name}.{narrow[node]}" if node in narrow else plan.stream]

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
