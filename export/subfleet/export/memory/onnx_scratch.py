"""What ONNX Runtime's CPU kernels take for themselves while they run, from their shapes.

Each was found by recording what every operator requests, and agrees with the kernels' sources: `conv.cc`,
`conv_transpose.cc`, `where_op.cc`, `softmax.cc`, `element_wise_ops.cc`, and `convolve.cpp` of MLAS. Kernels that are
not named here, matrix products and reductions among them, work in their outputs and on the stack.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx

from subfleet.export.memory.onnx_run import TensorType

__all__ = ["Scratch", "scratch_of"]

_FLOAT_BYTES = 4
_CONVOLUTION_BYTES = 65536
"""What one thread lays out of a convolution's patches at a time."""


Scratch = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of what a kernel takes before its outputs and after them; it gives all of it back when it ends."""
_NONE: Scratch = (), ()


def scratch_of(node: onnx.NodeProto, types: Mapping[str, TensorType]) -> Scratch:
    """The scratch memory of a node."""
    rule = _RULES.get(node.op_type)
    if rule is None:
        return _NONE
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    return rule(attributes, [types[name] for name in node.input if name], types[node.output[0]])


def _convolution(attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    x_shape, w_shape = inputs[0].shape, inputs[1].shape
    group = attributes.get("group", 1)
    filters, channels = w_shape[0] // group, w_shape[1]
    positions = math.prod(output.shape[2:])
    plain = all(step == 1 for step in attributes.get("strides", ())) and not any(attributes.get("pads", ()))
    if plain and math.prod(w_shape[2:]) == 1:
        return _NONE
    dense = all(step == 1 for step in attributes.get("dilations", ()))
    if plain and dense and channels == 1 and len(w_shape) == 4:
        whole_rows, whole_columns = w_shape[3] == x_shape[3], w_shape[2] == x_shape[2] and w_shape[3] == 1
        if whole_rows or whole_columns:
            return _NONE
    patches_bytes = _FLOAT_BYTES * positions * channels * math.prod(w_shape[2:])
    return (), (patches_bytes if filters > positions else _CONVOLUTION_BYTES,)


def _transposed(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], _output: TensorType) -> Scratch:
    x_shape, w_shape = inputs[0].shape, inputs[1].shape
    return (), (_FLOAT_BYTES * math.prod(w_shape[1:]) * math.prod(x_shape[2:]),)


def _where(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    condition, *branches = (entry.shape for entry in inputs)
    chosen = (output.item_bytes * math.prod(_broadcast(condition, branch)) for branch in branches)
    return tuple(chosen), ()


def _softmax(attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    if attributes.get("axis", -1) in (-1, len(inputs[0].shape) - 1):
        return _NONE
    return (), (output.size_bytes, output.size_bytes)


def _variadic(_attributes: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    return (output.size_bytes,) * max(len(inputs) - 2, 0), ()


def _like_output(_attributes: Mapping[str, Any], _inputs: Sequence[TensorType], output: TensorType) -> Scratch:
    return (), (output.size_bytes,)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(first), len(second))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (first, second))
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


_RULES: Mapping[str, Callable[[Mapping[str, Any], Sequence[TensorType], TensorType], Scratch]] = MappingProxyType(
    {
        "BiasGelu": _like_output,
        "Conv": _convolution,
        "ConvTranspose": _transposed,
        "FusedConv": _convolution,
        "LogSoftmax": _softmax,
        "Max": _variadic,
        "Min": _variadic,
        "Softmax": _softmax,
        "Sum": _variadic,
        "Where": _where,
    }
)
