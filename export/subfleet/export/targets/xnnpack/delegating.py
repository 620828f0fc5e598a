"""Replaces regions of a graph by calls of ExecuTorch's XNNPACK delegate, in as few regions as the data flow allows.

Small rewrites come first: masks become numbers, products take transposed factors, and slices become boxes.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from subfleet.export.canonical.cleaning import drop_dead_code
from subfleet.export.nodes import argument, shape_of
from subfleet.export.targets.executorch_program import make_exported_program
from subfleet.export.targets.xnnpack.graph import XnnpackGraph, is_floating
from subfleet.export.targets.xnnpack.operators import HUGE, OPERATORS, is_supported, part, product_by_transposed

MOST_VALUES = 4096
"""Inputs and outputs of a region; ExecuTorch's `XNNCompiler.cpp` refuses more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegateRegion:
    """Nodes that run together.

    Attributes:
        nodes: in the graph's order.
        inputs: nodes outside that they read.
        outputs: their nodes that are read outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def _phases_of(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """Return the phase of every call: odd ones hold the chosen nodes, even ones the others; data only flow forwards."""
    phase_by_node: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            phase_by_node[node] = 0
            continue
        before = max((phase_by_node[argument] for argument in node.all_input_nodes), default=0)
        parity = int(chosen(node))
        if node.target is operator.getitem:
            parity = before % 2
        phase_by_node[node] = before if before % 2 == parity else before + 1
    return phase_by_node


def split_regions(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> list[Sequence[fx.Node] | DelegateRegion]:
    """Return the graph's calls in a valid order: sequences of single nodes, and regions of chosen nodes."""
    phase_by_node = _phases_of(graph, chosen)
    last = max(phase_by_node.values(), default=0)
    parts: list[Sequence[fx.Node] | DelegateRegion] = []
    for phase in range(last + 1):
        nodes = [node for node in graph.nodes if node.op == "call_function" and phase_by_node[node] == phase]
        if phase % 2 == 0:
            parts.append(nodes)
            continue
        parts.extend(_make_regions(nodes))
    return parts


def _make_regions(nodes: Sequence[fx.Node]) -> Iterator[DelegateRegion]:
    """Yield the nodes as a region, or as several if the delegate does not take so many inputs and outputs."""
    inside = set(nodes)
    inputs = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    if len(inputs) + len(outputs) > MOST_VALUES:
        middle = len(nodes) // 2
        yield from _make_regions(nodes[:middle])
        yield from _make_regions(nodes[middle:])
    else:
        yield DelegateRegion(nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(outputs))


aten = torch.ops.aten


class _MaskBuilder:
    """Inserts nodes before another one, all with its shape and in single precision."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self._graph = graph
        self._like = like

    def __call__(self, target: Any, *arguments: Any) -> fx.Node:
        node = self._graph.call_function(target, arguments)
        node.meta["val"] = self._like.meta["val"]
        return node

    def above(self, a: Any, b: Any) -> fx.Node:
        """Return 1 where a is above b, and 0 elsewhere."""
        if isinstance(b, fx.Node) or b != 0:
            a = (
                self(aten.sub.Tensor, a, b)
                if isinstance(a, fx.Node)
                else self(aten.add.Tensor, self(aten.neg.default, b), a)
            )
        return self(aten.clamp.default, self(aten.mul.Tensor, a, HUGE), 0.0, 1.0)

    def differs(self, a: Any, b: Any) -> fx.Node:
        """Return 1 where a and b differ, and 0 elsewhere."""
        distance = self(aten.abs.default, self(aten.sub.Tensor, a, b))
        return self(aten.clamp.default, self(aten.mul.Tensor, distance, HUGE), 0.0, 1.0)

    def invert(self, mask: fx.Node) -> fx.Node:
        """Return 1 where the mask is 0, and 0 where it is 1."""
        return self(aten.add.Tensor, self(aten.neg.default, mask), 1.0)


_Comparison = Callable[[_MaskBuilder, Any, Any], fx.Node]
_COMPARISONS: Mapping[str, _Comparison] = MappingProxyType(
    {
        "aten::gt": lambda chain, a, b: chain.above(a, b),
        "aten::lt": lambda chain, a, b: chain.above(b, a),
        "aten::ge": lambda chain, a, b: chain.invert(chain.above(b, a)),
        "aten::le": lambda chain, a, b: chain.invert(chain.above(a, b)),
        "aten::ne": lambda chain, a, b: chain.differs(a, b),
        "aten::eq": lambda chain, a, b: chain.invert(chain.differs(a, b)),
    }
)


def _comparison_of(node: fx.Node) -> tuple[_Comparison, fx.Node] | None:
    """Return the comparison of floating numbers that a node converts to 0 and 1, with its rule."""
    compared: Any = node.args[0]
    if not is_floating(node) or not isinstance(compared, fx.Node) or compared.op != "call_function":
        return None
    schema = getattr(compared.target, "_schema", None)
    rule = _COMPARISONS.get(schema.name) if schema else None
    if rule is None or not all(is_floating(argument) for argument in compared.all_input_nodes):
        return None
    return rule, compared


def _write_mask(graph: fx.Graph, node: fx.Node) -> None:
    comparison = _comparison_of(node)
    if comparison is None:
        return
    rule, compared = comparison
    with graph.inserting_before(node):
        node.replace_all_uses_with(rule(_MaskBuilder(graph, node), *compared.args[:2]))


def _swaps_last(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.permute.default:
        return False
    dims: Any = node.args[1]
    rank = len(dims)
    return rank >= 2 and [dim % rank for dim in dims] == [*range(rank - 2), rank - 1, rank - 2]


def _write_product(node: fx.Node) -> None:
    first, second = argument(node, 0), argument(node, 1)
    if _swaps_last(second) and is_floating(node):
        node.target, node.args = product_by_transposed, (first, second.args[0])


def _write_part(node: fx.Node) -> None:
    """Turn a slice into a box, combined with the box that its source may be."""
    source: Any = node.args[0]
    dim, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start"), argument(node, 4, "step", 1)
    given, sizes = shape_of(source), shape_of(node)
    if step != 1 or not is_floating(node) or not given:
        return
    axis = dim % len(given)
    first: Any = start or 0
    offsets = [0] * len(given)
    offsets[axis] = max(first + given[axis], 0) if first < 0 else min(first, given[axis])
    if source.target is part:
        offsets = [a + b for a, b in zip(source.args[1], offsets, strict=True)]
        source = source.args[0]
    node.target, node.args = part, (source, offsets, list(sizes))


def prepare(graph: fx.GraphModule) -> None:
    """Rewrite a graph in place into operators that XNNPACK has."""
    for node in list(graph.graph.nodes):
        if node.target is aten._to_copy.default:  # noqa: SLF001 - the operator's name
            _write_mask(graph.graph, node)
        elif node.target is aten.slice.Tensor:
            _write_part(node)
        elif node.target in {aten.mm.default, aten.bmm.default}:
            _write_product(node)
    drop_dead_code(graph)


_BACKEND = "XnnpackBackend"
_ALIGNMENT = 16


def region_graph(region: DelegateRegion) -> XnnpackGraph:
    """Return XNNPACK's graph of a region, with inputs and outputs in the region's order."""
    graph = XnnpackGraph()
    given = set()
    for node in region.inputs:
        value = graph.input(shape_of(node))
        given.add(value)
        graph.bind(node, value)
    for node in region.nodes:
        graph.bind(node, OPERATORS[node.target](graph, node))
    for node in region.outputs:
        value = graph.value(node)
        if value in given or graph.is_constant(value):
            value = graph.unary("Copy", value)
        given.add(value)
        graph.output(value)
    return graph


def _shape_program(region: DelegateRegion) -> ExportedProgram:
    """Return a program of the region's shapes: the delegate's call needs one, but nothing reads it."""
    graph = fx.Graph()
    for index, node in enumerate(region.inputs):
        graph.placeholder(f"x{index}").meta["val"] = _delegate_tensor(node)
    results = []
    for node in region.outputs:
        result = graph.call_function(aten.full.default, (list(_delegate_tensor(node).shape), 0.0))
        result.meta["val"] = _delegate_tensor(node)
        results.append(result)
    graph.output(tuple(results))
    return make_exported_program(fx.GraphModule(torch.nn.Module(), graph), {})


def _call(
    graph: fx.Graph, root: fx.GraphModule, name: str, region: DelegateRegion, seen: Mapping[fx.Node, fx.Node]
) -> Any:
    """Append the call of a region; return the nodes of its results."""
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.delegate import executorch_call_delegate
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    written = region_graph(region)
    root.meta["packed"] += written.packed
    body = written.serialise()
    store = NamedDataStore()
    for key, content in written.stored.items():
        store.add_named_data(key, content, _ALIGNMENT)
    lowered = LoweredBackendModule(_shape_program(region), _BACKEND, body, [], store.get_named_data_store_output())
    root.add_module(name, lowered)
    arguments = (graph.get_attr(name), *(_view_as(graph, seen[node], _delegate_tensor(node)) for node in region.inputs))
    call = graph.call_function(executorch_call_delegate, arguments)
    call.meta["val"] = tuple(_delegate_tensor(node) for node in region.outputs)
    results = []
    for index, node in enumerate(region.outputs):
        result = graph.call_function(operator.getitem, (call, index))
        result.meta["val"] = _delegate_tensor(node)
        results.append(_view_as(graph, result, node.meta["val"]))
    return results


def _copy_if_input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy a result that is an input: the runtime returns no inputs."""
    if node.op == "call_function":
        return node
    copy = graph.call_function(aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy


def _delegate_tensor(node: fx.Node) -> Tensor:
    """Return a node's tensor as the delegate takes it: with at least one dimension."""
    value: Tensor = node.meta["val"]
    return value if value.dim() else value.new_empty((1,))


def _view_as(graph: fx.Graph, node: fx.Node, like: Tensor) -> fx.Node:
    """View a tensor in another one's shape."""
    if node.meta["val"].shape == like.shape:
        return node
    view = graph.call_function(aten.view.default, (node, list(like.shape)))
    view.meta["val"] = like
    return view


def delegate(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that computes the same, with calls of the delegate for everything that XNNPACK can do.

    Its `meta["packed"]` lists the rows and columns of all constant factors of products.

    Args:
        graph: flat, of PyTorch's basic operators; it is changed.
    """
    prepare(graph)
    root = fx.GraphModule(torch.nn.Module(), fx.Graph())
    root.meta["packed"] = []
    new = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(node.target, getattr(graph, node.target))
        if node.op in {"placeholder", "get_attr"}:
            seen[node] = new.node_copy(node)
    for number, group in enumerate(split_regions(graph.graph, is_supported)):
        if isinstance(group, DelegateRegion):
            results = _call(new, root, f"xnnpack_{number}", group, seen)
            seen.update(zip(group.outputs, results, strict=True))
            continue
        for node in group:
            seen[node] = new.node_copy(node, lambda argument: seen[argument])
    outputs: Any = graph.graph.output_node().args[0]
    new.output(tuple(_copy_if_input(new, seen[node]) for node in outputs))
    root.graph = new
    return root
