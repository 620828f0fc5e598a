"""Small groups of operators that ONNX has one operator with a fast kernel for; tried before the plain translations.

Batch sizes are fixed here. Each function looks at a node and its inputs, and either writes the single operator or
returns None. Inputs that are no longer read were already written; the writer drops what nothing depends on.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from subfleet.export.targets.onnx_operators import Emitter
from subfleet.export.targets.onnx_operators.emitting import NUMPY_TYPES, dtype_of, ints, shape_of

__all__ = ["FUSIONS"]

aten = torch.ops.aten
_LEAST_POSITIONS = 8
"""With fewer positions in a channel, the kernel for affine maps spends its time between channels (measured)."""


def _is(node: Any, *operators: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in operators


def _affine(emitter: Emitter, node: Any) -> str | None:
    """Fuse one scale and one offset for each channel, or each sample's channel, into one pass instead of two."""
    product, offset = node.args[:2]
    if not (_is(product, aten.mul.Tensor) and len(product.users) == 1 and node.kwargs.get("alpha", 1) == 1):
        return None
    x, scale = product.args
    if not all(isinstance(part, fx.Node) for part in (x, scale, offset)) or dtype_of(node) != torch.float32:
        return None
    shape = shape_of(node)
    if len(shape) != 3 or shape_of(x) != shape or shape[2] < _LEAST_POSITIONS:
        return None
    if not all(shape_of(part) in {(1, shape[1], 1), (*shape[:2], 1)} for part in (scale, offset)):
        return None
    count = shape[1] if shape_of(scale) == shape_of(offset) == (1, shape[1], 1) else shape[0] * shape[1]
    parts = [_per_row(emitter, part, shape, count) for part in (scale, offset)]
    if node.target is aten.sub.Tensor:
        parts[1] = emitter.add("Neg", parts[1])
    still = [emitter.constant(np.full(count, value, dtype=NUMPY_TYPES[torch.float32])) for value in (0.0, 1.0)]
    name = emitter.value(x)
    if count == shape[1]:
        return emitter.add("BatchNormalization", name, *parts, *still, output=node, epsilon=0.0)
    rows = emitter.add("Reshape", name, ints(emitter, [1, count, shape[2]]))
    mapped = emitter.add("BatchNormalization", rows, *parts, *still, epsilon=0.0)
    return emitter.add("Reshape", mapped, ints(emitter, shape), output=node)


def _per_row(emitter: Emitter, part: fx.Node, shape: tuple[int, ...], count: int) -> str:
    """Return one number for each of `count` rows."""
    name = emitter.value(part)
    if shape_of(part)[0] == 1 and count != shape[1]:
        name = emitter.add("Expand", name, ints(emitter, [*shape[:2], 1]))
    return emitter.add("Reshape", name, ints(emitter, [count]))


def _ramp(emitter: Emitter, node: Any) -> str | None:
    """Fuse a ramp from 0 to 1: x * slope, or x * slope + start, clamped to these bounds."""
    x, *bounds = node.args
    if bounds != [0.0, 1.0] or not isinstance(x, fx.Node) or len(x.users) != 1:
        return None
    start: Any = 0.0
    if _is(x, aten.add.Tensor) and isinstance(x.args[1], int | float) and not x.kwargs:
        x, start = x.args
    if not (_is(x, aten.mul.Tensor) and isinstance(x.args[1], int | float) and len(x.users) == 1):
        return None
    x, slope = x.args
    return emitter.add("HardSigmoid", emitter.value(x), output=node, alpha=float(slope), beta=float(start))


def _fuse_padding(emitter: Emitter, node: Any) -> str | None:
    """Fuse a convolution with the zero padding of its input."""
    padded, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or not _is(padded, aten.constant_pad_nd.default) or len(padded.users) != 1:
        return None
    x, amounts, *number = padded.args
    dims = len(stride)
    if (number and number[0] != 0) or min(amounts) < 0 or any(amounts[2 * dims :]):
        return None
    amounts = [*amounts, *[0] * (2 * dims - len(amounts))]
    before, after = (amounts[side : 2 * dims : 2][::-1] for side in (0, 1))
    names = [emitter.value(part) for part in (x, weight, bias) if part is not None]
    return emitter.add(
        "Conv",
        *names,
        output=node,
        strides=list(stride),
        pads=[
            own + added
            for amounts_of_side in (before, after)
            for own, added in zip(padding, amounts_of_side, strict=True)
        ],
        dilations=list(dilation),
        group=groups,
        kernel_shape=list(shape_of(weight)[2:]),
    )


FUSIONS: Mapping[Any, Callable[[Emitter, Any], str | None]] = MappingProxyType(
    {
        aten.add.Tensor: _affine,
        aten.sub.Tensor: _affine,
        aten.clamp.default: _ramp,
        aten.convolution.default: _fuse_padding,
    }
)
