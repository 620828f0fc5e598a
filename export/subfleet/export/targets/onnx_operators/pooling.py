"""Maximum pooling and its backward."""

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from subfleet.export.lowerings.pooling import pooled_size
from subfleet.export.nodes import shape_of
from subfleet.export.targets.onnx_operators.emitting import Emitter, Node, Translation, dtype_of, ints

aten = torch.ops.aten


def _read_windows(given: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Return kernel, stride, padding and dilation, two numbers each."""
    defaults: list[list[int]] = [[], [0], [1]]
    kernel, *others = [list(values) for values in given]
    stride, padding, dilation = others + defaults[len(others) :]
    pairs = zip(("kernel", "stride", "padding", "dilation"), (kernel, stride or kernel, padding, dilation), strict=True)
    return {name: [values[0], values[-1]] for name, values in pairs}


def _maximum_pool(emitter: Emitter, node: Node) -> str:
    x, *given = node.args
    ceil_mode = bool(given[4]) if len(given) > 4 else False
    at = _read_windows(given[:4])
    behind = []
    for axis, size in enumerate(shape_of(x)[-2:]):
        window, stride, padding, dilation = (at[name][axis] for name in ("kernel", "stride", "padding", "dilation"))
        count = pooled_size(size, window, stride, padding, dilation, ceil_mode=ceil_mode)
        # Windows beyond the end are written as padding, which is never the maximum.
        behind.append(max((count - 1) * stride + dilation * (window - 1) + 1 - size - padding, padding))
    name = emitter.value(x)
    settings: dict[str, Any] = {"kernel_shape": at["kernel"], "strides": at["stride"]}
    settings |= {"pads": [*at["padding"], *behind], "dilations": at["dilation"]}
    parts, readers = [f"{node.name}.{index}" for index in range(2)], _list_readers(node)
    if not readers or not _is_compared(node):
        return emitter.add("MaxPool", name, outputs=parts if readers else parts[:1], **settings)
    maxima = emitter.add("MaxPool", _as_planes(emitter, name, shape_of(x)), outputs=[_name_maxima(node)], **settings)
    return emitter.add("Reshape", maxima, ints(emitter, node.meta["val"][0].shape), outputs=parts[:1])


def _as_planes(emitter: Emitter, name: str, shape: Sequence[int]) -> str:
    """View every channel of every sample as a sample of one channel.

    The runtime lays channels of a pool in blocks, if they are a multiple of these, and so copies the tensor before and
    after it.
    """
    return emitter.add("Reshape", name, ints(emitter, [math.prod(shape[:-2]), 1, *shape[-2:]]))


def _name_maxima(pool: Node) -> str:
    """The name of the maxima of a pool as planes."""
    return f"{pool.name}.planes"


def _list_readers(pool: Node) -> list[Node]:
    """The nodes that read the indices of a pool."""
    return [reader for part in pool.users if part.args[1] == 1 for reader in part.users]


def _is_compared(pool: Node) -> bool:
    """Whether elements are compared with the maxima of a pool, because nothing needs its indices."""
    return all(map(_has_own_windows, _list_readers(pool)))


def _has_own_windows(node: Node) -> bool:
    """Whether a node is the backward of a pool in this program whose windows, all whole, lie side by side."""
    if node.target is not aten.max_pool2d_with_indices_backward.default or dtype_of(node) != torch.float32:
        return False
    gradient, x, *given, _ceil_mode, indices = node.args
    at = _read_windows(given)
    sizes = zip(shape_of(gradient)[-2:], at["stride"], shape_of(x)[-2:], strict=True)
    return (
        (indices.target, len(shape_of(x))) == (operator.getitem, 4)
        and (at["stride"], at["padding"], at["dilation"]) == (at["kernel"], [0, 0], [1, 1])
        and all(count * stride <= size for count, stride, size in sizes)
    )


def _maximum_pool_backward(emitter: Emitter, node: Node) -> str:
    """Give the gradient of each window to its first maximum."""
    gradient, x, *given, _ceil_mode, indices = node.args
    if _has_own_windows(node) and _is_compared(indices.args[0]):
        return _give_to_first(emitter, node, _name_maxima(indices.args[0]), _read_windows(given)["kernel"])
    # ONNX counts indices over the whole tensor, so gradients are added to a single row.
    flat = ints(emitter, [-1])
    zeros = emitter.add("Expand", emitter.value(0.0, dtype_of(node)), ints(emitter, [math.prod(shape_of(x))]))
    places, parts = (emitter.add("Reshape", emitter.value(argument), flat) for argument in (indices, gradient))
    added = emitter.add("ScatterElements", zeros, places, parts, axis=0, reduction="add")
    return emitter.add("Reshape", added, ints(emitter, shape_of(x)), output=node)


def _give_to_first(emitter: Emitter, node: Node, maxima: str, kernel: Sequence[int]) -> str:
    """Compare elements with the maximum of their window; of equal ones, the one with the highest rank is the first.

    All of it is whole passes over the tensor. The runtime's kernels for indices look at one element after the other:
    forward and backward of a pool took twice to four times as long with them (measured).
    """
    counts, sizes = shape_of(node.args[0])[-2:], shape_of(node)
    covered = [count * window for count, window in zip(counts, kernel, strict=True)]
    x, gradient = (_as_planes(emitter, emitter.value(node.args[part]), shape_of(node.args[part])) for part in (1, 0))
    if covered != list(sizes[-2:]):
        x = emitter.add("Slice", x, *(ints(emitter, values) for values in ([0, 0], covered, [2, 3])))

    def spread(name: str) -> str:
        scales = emitter.constant(np.array([1, 1, *kernel], dtype=np.float32))
        places: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return emitter.add("Resize", name, "", scales, mode="nearest", **places)

    def equal(first: str, second: str) -> str:
        return emitter.add("Cast", emitter.add("Equal", first, second), to=1)

    ranks = np.arange(math.prod(kernel), 0, -1, dtype=np.float32).reshape(kernel)
    ranks_everywhere = emitter.add("Tile", emitter.constant(ranks), ints(emitter, counts))
    ranked = emitter.add("Mul", equal(x, spread(maxima)), ranks_everywhere)
    best = emitter.add("MaxPool", ranked, kernel_shape=list(kernel), strides=list(kernel))
    given = emitter.add("Mul", equal(ranked, spread(best)), spread(gradient))
    missing = [size - cover for size, cover in zip(sizes[-2:], covered, strict=True)]
    if any(missing):
        given = emitter.add("Pad", given, ints(emitter, [0] * 6 + missing))
    return emitter.add("Reshape", given, ints(emitter, sizes), output=node)


POOLS: Mapping[object, Translation] = MappingProxyType(
    {
        aten.max_pool2d_with_indices.default: _maximum_pool,
        aten.max_pool2d_with_indices_backward.default: _maximum_pool_backward,
    }
)
