"""Operators that are whole layers, products and reductions."""

import math
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


def _convolution(emitter: Emitter, node: Node) -> str:
    inputs, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    names = [emitter.value(argument) for argument in (inputs, weight, bias) if argument is not None]
    attributes = {
        "strides": list(stride),
        "pads": [*padding, *padding],
        "dilations": list(dilation),
        "group": groups,
        "kernel_shape": list(shape_of(weight)[2:]),
    }
    if transposed:
        attributes["output_padding"] = list(output_padding)
    return emitter.add("ConvTranspose" if transposed else "Conv", *names, output=node, **attributes)


def _addmm(emitter: Emitter, node: Node) -> str:
    bias, left, right = (emitter.value(argument) for argument in node.args)
    factors: dict[str, Any] = {name: float(node.kwargs.get(name, 1)) for name in ("alpha", "beta")}
    return emitter.add("Gemm", left, right, bias, output=node, **factors)


def _reduction(operator: str) -> Translation:
    def translate(emitter: Emitter, node: Node) -> str:
        x, dims, keep = arguments(node, None, None, False)
        inputs = [emitter.value(x, dtype_of(node))]
        if dims or isinstance(dims, int):
            inputs.append(ints(emitter, [dims] if isinstance(dims, int) else dims))
        return emitter.add(operator, *inputs, output=node, keepdims=int(bool(keep)))

    return translate


_LONG_SUM = 2**14
"""So many elements in a row are summed in two steps. ONNX Runtime adds them one after the other, and each addition
rounds: 34 times PyTorch's error for 400,000 elements, 3 times in two steps, in the same time (measured)."""


def _sum(emitter: Emitter, node: Node) -> str:
    x, dims, keep = arguments(node, None, None, False)
    shape = shape_of(x)
    summed = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape)))}
    first = len(shape)
    while first - 1 in summed:
        first -= 1
    count = math.prod(shape[first:])
    middles = [place for place in range(first, len(shape)) if 1 < math.prod(shape[place:]) < count]
    if count < _LONG_SUM or not middles:
        return _reduction("ReduceSum")(emitter, node)
    middle = min(middles, key=lambda place: math.prod(shape[place:]) + math.prod(shape[first:place]))
    rows = emitter.add("ReduceSum", emitter.value(x, dtype_of(node)), ints(emitter, range(middle, len(shape))))
    return emitter.add("ReduceSum", rows, ints(emitter, sorted(summed)), output=node, keepdims=int(bool(keep)))


def _index_of_extreme(operator: str) -> Translation:
    def translate(emitter: Emitter, node: Node) -> str:
        x, dim, keep = arguments(node, None, None, False)
        name = emitter.value(x)
        if dim is None:
            name, dim = emitter.add("Reshape", name, ints(emitter, [-1])), 0
        return emitter.add(operator, name, output=node, axis=dim, keepdims=int(bool(keep)))

    return translate


def _cumulative_sum(emitter: Emitter, node: Node) -> str:
    return emitter.add("CumSum", emitter.value(node.args[0]), ints(emitter, node.args[1]), output=node)


def _layer_norm(emitter: Emitter, node: Node) -> str:
    """The operator also returns the statistics, which the backward reads."""
    x, normalized, weight, bias, epsilon = node.args
    if weight is None:
        ones = np.ones(tuple(normalized), dtype=NUMPY_TYPES[dtype_of(x)])
        names = [emitter.value(x), emitter.constant(ones)]
    else:
        names = [emitter.value(x), emitter.value(weight)]
    if bias is not None:
        names.append(emitter.value(bias))
    parts = [f"{node.name}.{index}" for index in range(3)]
    return emitter.add("LayerNormalization", *names, outputs=parts, axis=-len(normalized), epsilon=float(epsilon))


LAYERS: Mapping[object, Translation] = MappingProxyType(
    {
        **dict.fromkeys((aten.mm.default, aten.bmm.default), direct("MatMul", 0, 1)),
        **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
        **dict.fromkeys((aten.mean.default, aten.mean.dim), _reduction("ReduceMean")),
        **dict.fromkeys((aten.amax.default,), _reduction("ReduceMax")),
        **dict.fromkeys((aten.amin.default,), _reduction("ReduceMin")),
        **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _reduction("ReduceProd")),
        aten.convolution.default: _convolution,
        aten.addmm.default: _addmm,
        aten._softmax.default: direct("Softmax", 0, axis=1),  # noqa: SLF001 - the operator's name
        aten._log_softmax.default: direct("LogSoftmax", 0, axis=1),  # noqa: SLF001 - the operator's name
        aten.argmax.default: _index_of_extreme("ArgMax"),
        aten.argmin.default: _index_of_extreme("ArgMin"),
        aten.cumsum.default: _cumulative_sum,
        aten.native_layer_norm.default: _layer_norm,
    }
)
