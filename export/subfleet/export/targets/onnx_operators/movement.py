"""Operators that move elements: shapes, slices, gathers and scatters; and constants."""

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from subfleet.export.nodes import shape_of
from subfleet.export.targets.onnx_operators.emitting import (
    NUMPY_TYPES,
    Emitter,
    Node,
    Translation,
    arguments,
    direct,
    dtype_of,
    ints,
)

aten = torch.ops.aten


def _reshape(emitter: Emitter, node: Node) -> str:
    """Write unchanged leading sizes as "as in the input", the next as "the rest": a batch may then have any size."""
    old, new = shape_of(node.args[0]), list(shape_of(node))
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same] and old[same]:
        same += 1
    if 0 not in new:
        new[:same] = [0] * same
        if same < len(new):
            new[same] = -1
    return emitter.add("Reshape", emitter.value(node.args[0]), ints(emitter, new), output=node)


def _transpose(emitter: Emitter, node: Node) -> str:
    count = len(shape_of(node.args[0]))
    order = list(range(count))
    if node.target is aten.permute.default:
        order = [int(dim) % count for dim in node.args[1]]
    elif count > 1:
        first, second = (0, 1) if node.target is aten.t.default else (int(dim) % count for dim in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    return emitter.add("Transpose", emitter.value(node.args[0]), output=node, perm=order)


def _expand(emitter: Emitter, node: Node) -> str:
    """Write sizes that stay as 1, which does not change them, so that a batch may have any size."""
    old, new = shape_of(node.args[0]), list(shape_of(node))
    padded = [1] * (len(new) - len(old)) + list(old)
    sizes = [1 if before == after else after for before, after in zip(padded, new, strict=True)]
    return emitter.add("Expand", emitter.value(node.args[0]), ints(emitter, sizes), output=node)


def _slice(emitter: Emitter, node: Node) -> str:
    x, dim, start, end, step = arguments(node, None, 0, None, None, 1)
    size = shape_of(x)[dim]
    stop = size if end is None else min(end, size)
    bounds = [ints(emitter, [number]) for number in (start or 0, stop, dim, step)]
    return emitter.add("Slice", emitter.value(x), *bounds, output=node)


def _select(emitter: Emitter, node: Node) -> str:
    x, dim, index = node.args
    return emitter.add("Gather", emitter.value(x), ints(emitter, index), output=node, axis=dim)


def _flip(emitter: Emitter, node: Node) -> str:
    x, dims = node.args
    most = np.iinfo(np.int64)
    bounds = [[-1] * len(dims), [most.min] * len(dims), list(dims), [-1] * len(dims)]
    return emitter.add("Slice", emitter.value(x), *(ints(emitter, bound) for bound in bounds), output=node)


def _concatenate(emitter: Emitter, node: Node) -> str:
    parts, dim = arguments(node, None, 0)
    return emitter.add("Concat", *(emitter.value(part) for part in parts), output=node, axis=int(dim))


def _pad(emitter: Emitter, node: Node) -> str:
    """PyTorch counts from the last dimension; ONNX lists all beginnings, then all ends."""
    x, pads, number = arguments(node, None, None, 0.0)
    unpadded = len(shape_of(x)) - len(pads) // 2
    before = [0] * unpadded + list(pads[0::2])[::-1]
    after = [0] * unpadded + list(pads[1::2])[::-1]
    filler = emitter.value(number, dtype_of(node))
    return emitter.add("Pad", emitter.value(x), ints(emitter, before + after), filler, output=node)


def _repeat(emitter: Emitter, node: Node) -> str:
    x, times = node.args
    name, missing = emitter.value(x), len(times) - len(shape_of(x))
    if missing:
        name = emitter.add("Unsqueeze", name, ints(emitter, range(missing)))
    return emitter.add("Tile", name, ints(emitter, times), output=node)


def _embedding(emitter: Emitter, node: Node) -> str:
    table, tokens = node.args[:2]
    return emitter.add("Gather", emitter.value(table), emitter.value(tokens), output=node, axis=0)


def _scatter(emitter: Emitter, node: Node) -> str:
    x, dim, index, source = node.args[:4]
    if not hasattr(source, "meta"):
        number = emitter.value(source, dtype_of(node))
        updates = emitter.add("Expand", number, ints(emitter, shape_of(index)))
    else:
        updates = emitter.value(source, dtype_of(node))
    reduction = {"reduction": "add"} if node.target is aten.scatter_add.default else {}
    return emitter.add(
        "ScatterElements", emitter.value(x), emitter.value(index), updates, output=node, axis=dim, **reduction
    )


def _index_put(emitter: Emitter, node: Node) -> str:
    """Write whole rows, chosen by one index of the first dimension; our lowerings leave no other form."""
    x, indices, values, accumulate = arguments(node, None, None, None, False)
    (index,) = indices
    places = emitter.add("Unsqueeze", emitter.value(index), ints(emitter, [-1]))
    reduction = {"reduction": "add"} if accumulate else {}
    return emitter.add("ScatterND", emitter.value(x), places, emitter.value(values), output=node, **reduction)


def _fill(emitter: Emitter, node: Node) -> str:
    """Translate a tensor filled with a number."""
    value: Any = node.args[1] if node.target is aten.full.default else int(node.target is aten.ones.default)
    scalar: np.ndarray[Any, Any] = np.asarray(value, dtype=NUMPY_TYPES[dtype_of(node)])
    return emitter.add("Expand", emitter.constant(scalar), ints(emitter, shape_of(node)), output=node)


def _scalar(emitter: Emitter, node: Node) -> str:
    return emitter.constant(np.asarray(node.args[0], dtype=NUMPY_TYPES[dtype_of(node)]))


def _arange(emitter: Emitter, node: Node) -> str:
    return emitter.constant(np.arange(*node.args, dtype=NUMPY_TYPES[dtype_of(node)]))


def _part(_emitter: Emitter, node: Node) -> str:
    """Return one of several results, by the name that its operator's translation gave it."""
    several, index = node.args
    return f"{several.name}.{index}"


_RESHAPES = (
    aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default,
)  # fmt: skip

SHAPING: Mapping[object, Translation] = MappingProxyType(
    {
        **dict.fromkeys(_RESHAPES, _reshape),
        **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
        **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), _fill),
        **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
        **dict.fromkeys((aten.scatter_add.default, aten.scatter.src, aten.scatter.value), _scatter),
        aten.expand.default: _expand,
        aten.slice.Tensor: _slice,
        aten.select.int: _select,
        aten.flip.default: _flip,
        aten.cat.default: _concatenate,
        aten.constant_pad_nd.default: _pad,
        aten.repeat.default: _repeat,
        aten.index_select.default: direct("Gather", 0, 2, axis=1),
        aten.embedding.default: _embedding,
        aten.gather.default: direct("GatherElements", 0, 2, axis=1),
        aten.index_put.default: _index_put,
        aten.scalar_tensor.default: _scalar,
        operator.getitem: _part,
    }
)
