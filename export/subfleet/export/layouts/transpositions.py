"""Removes transpositions: each tensor keeps the order in which it was computed until an operator needs another.

Lowerings may then write every step in the order that suits it, such as channels last around a convolution, and nothing
is moved between two of them. Elementwise operators, reductions, slices, padding and products take tensors in any order.

A tensor is stored in some order of its dimensions: `order[i]` is the logical dimension at position `i`. Dimensions of
size 1 may be anywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule  # code that nothing runs is not written

from subfleet.export.canonical.cleaning import drop_dead_code
from subfleet.export.nodes import append_call, argument, shape_of


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the position of each logical dimension."""
    positions = [0] * len(order)
    for position, dim in enumerate(order):
        positions[dim] = position
    return tuple(positions)


def held_shape(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in memory of a tensor with a logical shape."""
    return tuple(shape[dim] for dim in order)


def _same_memory(shape: Sequence[int], order: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether a tensor in `order` has the same memory in `other`, ignoring sizes of 1."""
    return [dim for dim in order if shape[dim] != 1] == [dim for dim in other if shape[dim] != 1]


def _segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut both shapes into the shortest sequences of dimensions with equal products."""
    runs: list[tuple[list[int], list[int]]] = []
    at_old = at_new = 0
    while at_old < len(old) or at_new < len(new):
        before, after = [], []
        left, right = 1, 1
        if at_old < len(old):
            before.append(at_old)
            left = old[at_old]
            at_old += 1
        if at_new < len(new):
            after.append(at_new)
            right = new[at_new]
            at_new += 1
        while left != right:
            if left < right:
                before.append(at_old)
                left *= old[at_old]
                at_old += 1
            else:
                after.append(at_new)
                right *= new[at_new]
                at_new += 1
        runs.append((before, after))
    return runs


def reshape_order(old: Sequence[int], order: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Return the order of a reshaped tensor if its memory can stay as it is; otherwise None.

    Args:
        old: logical shape before.
        order: in memory.
        new: logical shape after.
    """
    if math.prod(old) == 0:
        return None
    parts: list[tuple[int, list[int]]] = []
    positions = inverse(order)
    # Several dimensions can only be cut differently if they are adjacent and in order.
    solid = [dim for dim in order if old[dim] != 1]
    ranks = {dim: rank for rank, dim in enumerate(solid)}
    ones: list[int] = []
    for before, after in _segments(old, new):
        dims = [dim for dim in before if old[dim] != 1]
        if not dims:
            ones.extend(after)
            continue
        if any(ranks[b] != ranks[a] + 1 for a, b in pairwise(dims)):
            return None
        parts.append((positions[dims[0]], after))
    parts.sort()
    return (*ones, *(dim for _, after in parts for dim in after))


aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor of the old graph in the new graph.

    Attributes:
        node: in the new graph; if the tensor is expanded, its shape has 1 where the logical shape has more.
        shape: the logical shape.
        order: `order[i]` is the logical dimension at position `i` of the node.
    """

    node: fx.Node
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The node's shape in the logical order, with 1 where the tensor is expanded."""
        held = self.node.meta["val"].shape
        return tuple(int(held[index]) for index in inverse(self.order))

    @property
    def plain(self) -> bool:
        """Whether the node is in the logical order."""
        return self.order == tuple(range(len(self.order)))


def _view_source(node: fx.Node) -> fx.Node:
    """Return the source of a view, or any other node itself."""
    while node.op == "call_function" and node.target is aten.view.default:
        node = argument(node, 0)
    return node


class GraphRewriter:
    """Writes the new graph."""

    def __init__(self, mode: Any) -> None:
        self.graph = fx.Graph()
        self._mode = mode
        self._held: dict[fx.Node, HeldTensor] = {}
        self._copies: dict[tuple[Any, ...], fx.Node] = {}
        self._fakes: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def tensor_of(self, node: fx.Node) -> HeldTensor:
        """Return a tensor of the old graph in the new one."""
        return self._held[node]

    def bind(self, old: fx.Node, new: HeldTensor) -> None:
        """Set a tensor of the old graph in the new one."""
        self._held[old] = new

    def add(
        self, target: Any, arguments: tuple[Any, ...], shape: Sequence[int], result: torch.dtype, **options: Any
    ) -> fx.Node:
        """Append a node with a shape and a type of its result."""
        node = append_call(self.graph, target, arguments, options)
        key = (tuple(shape), result)
        if key not in self._fakes:
            with self._mode:
                self._fakes[key] = torch.empty(key[0], dtype=result)
        node.meta["val"] = self._fakes[key]
        return node

    def view(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """View a node in another shape; a view of a view becomes a view of its source."""
        node = _view_source(node)
        value: Tensor = node.meta["val"]
        if tuple(value.shape) == tuple(shape):
            return node
        key = (node, tuple(shape))
        if key not in self._copies:
            self._copies[key] = self.add(aten.view.default, (node, list(shape)), shape, value.dtype)
        return self._copies[key]

    def permute(self, node: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Copy a node with its dimensions in another order; done once for all uses."""
        value: Tensor = node.meta["val"]
        key = (node, "permute", tuple(dims))
        if key not in self._copies:
            shape = [value.shape[dim] for dim in dims]
            self._copies[key] = self.add(aten.permute.default, (node, list(dims)), shape, value.dtype)
        return self._copies[key]

    def in_order(self, held: HeldTensor, order: Sequence[int]) -> fx.Node:
        """Return a tensor in a given order; expanded dimensions stay 1."""
        if tuple(order) == held.order:
            return held.node
        own = held.own_shape
        if _same_memory(own, held.order, order):
            return self.view(held.node, held_shape(own, order))
        inverse_order = inverse(held.order)
        return self.permute(held.node, [inverse_order[dim] for dim in order])

    def expand(self, held: HeldTensor) -> HeldTensor:
        """Return the tensor with no dimension left expanded."""
        if held.own_shape == held.shape:
            return held
        shape = held_shape(held.shape, held.order)
        dtype = held.node.meta["val"].dtype
        key = (held.node, "expand", shape)
        if key not in self._copies:
            self._copies[key] = self.add(aten.expand.default, (held.node, list(shape)), shape, dtype)
        return HeldTensor(node=self._copies[key], shape=held.shape, order=held.order)

    def plain(self, held: HeldTensor) -> fx.Node:
        """Return the tensor in its logical shape."""
        whole = self.expand(held)
        return self.in_order(whole, range(len(whole.shape)))

    def write(
        self,
        old: fx.Node,
        arguments: tuple[Any, ...],
        order: Sequence[int],
        *,
        own: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        """Append a node's operator with other arguments, and bind its result.

        Args:
            old: in the old graph.
            arguments: of the new node.
            order: of the result's dimensions in memory.
            own: the result's shape, with 1 where it is expanded; by default nothing is.
            **options: further options of the new node.
        """
        shape = shape_of(old)
        held = held_shape(shape if own is None else own, order)
        node = self.add(old.target, arguments, held, old.meta["val"].dtype, **options)
        self.bind(old, HeldTensor(node=node, shape=shape, order=tuple(order)))

    def bind_view(self, old: fx.Node, node: fx.Node, own: Sequence[int], order: tuple[int, ...]) -> None:
        """Bind the view of a node; `own` is its shape in the logical order, with 1 where it is expanded."""
        seen = self.view(node, held_shape(own, order))
        self.bind(old, HeldTensor(node=seen, shape=shape_of(old), order=order))

    def bind_plain(self, old: fx.Node, node: fx.Node) -> None:
        """Set a node that has the old one's logical order."""
        shape = shape_of(node)
        self.bind(old, HeldTensor(node=node, shape=shape, order=tuple(range(len(shape)))))


Rule = Callable[[GraphRewriter, fx.Node], None]


def _operator(node: fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    return target  # type: ignore[no-any-return]


def rewrite_plain(rewriting: GraphRewriter, node: fx.Node) -> None:
    """Rewrite an operator that takes its tensors in the logical order."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda argument: rewriting.plain(rewriting.tensor_of(argument)))
    new = rewriting.graph.call_function(_operator(node), *arguments)
    new.meta["val"] = node.meta["val"]
    if isinstance(node.meta["val"], Tensor):
        rewriting.bind_plain(node, new)
    else:
        rewriting.bind(node, HeldTensor(node=new, shape=(), order=()))


def _item(rewriting: GraphRewriter, node: fx.Node) -> None:
    source, index = argument(node, 0), argument(node, 1)
    new = rewriting.graph.call_function(_operator(node), (rewriting.tensor_of(source).node, index))
    new.meta["val"] = node.meta["val"]
    rewriting.bind_plain(node, new)


def _results(rewriting: GraphRewriter, results: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the graph's results in the logical order, each with its own memory: no input, and none twice."""
    results_found: list[fx.Node] = []
    for result in results:
        node = rewriting.plain(rewriting.tensor_of(result))
        if _view_source(node).op == "placeholder" or _view_source(node) in map(_view_source, results_found):
            value: Tensor = node.meta["val"]
            node = rewriting.add(aten.clone.default, (node,), value.shape, value.dtype)
        results_found.append(node)
    return tuple(results_found)


def remove_transpositions(graph: fx.GraphModule, rules: Mapping[Any, Rule]) -> fx.GraphModule:
    """Return a graph that computes the same with fewer transpositions.

    Args:
        graph: flat, of PyTorch's basic operators, with a fake tensor in each node's `meta["val"]`.
        rules: of operators that take tensors in another order; others get them in the logical order.

    Returns:
        The new graph, with the same inputs and outputs.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    mode = inputs[0].meta["val"].fake_mode
    rewriting = GraphRewriter(mode)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            is_item = _operator(node).__module__ == "_operator"
            rule = _item if is_item else rules.get(node.target, rewrite_plain)
            rule(rewriting, node)
        elif node.op == "output":
            rewriting.graph.output(_results(rewriting, node.args[0]))
        else:
            new = rewriting.graph.node_copy(node)
            if node.op == "get_attr" and "val" not in new.meta:
                new.meta["val"] = mode.from_tensor(getattr(graph, str(node.target)))
            rewriting.bind_plain(node, new)
    new_module = _LazyGraphModule(graph, rewriting.graph)
    drop_dead_code(new_module)
    return new_module
