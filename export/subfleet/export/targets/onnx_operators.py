"""PyTorch's basic operators in ONNX: one small function each, in one table.

Only what our lowerings leave over is here. Shapes are fixed at export time, except that a leading size which an
operator keeps is written as "keep", so that an inference model takes batches of any size.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

__all__ = ["OPERATORS", "Emitter", "Translation"]

aten = torch.ops.aten
_ONNX_TYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float64: 11, torch.int32: 6}
)
_NUMPY_TYPES: Mapping[torch.dtype, type] = MappingProxyType(
    {torch.float32: np.float32, torch.int64: np.int64, torch.bool: np.bool_, torch.float64: np.float64}
)


Node = Any
"""An `fx.Node`, whose arguments and metadata PyTorch leaves untyped."""


class Emitter(Protocol):
    """What a translation may ask of the graph that is being written."""

    def add(self, operator: str, *inputs: str, output: Node | None = None, **attributes: Any) -> str:
        """Append a node; the name of its output, which is that of `output` where given."""
        ...

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """The name of a node's value, or of a constant, converted to `dtype` where that differs."""
        ...

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """The name of a constant; equal ones are written once."""
        ...


Translation = Callable[[Emitter, fx.Node], str]


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _shape(argument: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in argument.meta["val"].shape)


def _ints(emitter: Emitter, values: Any) -> str:
    return emitter.constant(np.asarray(values, dtype=np.int64))


def _widest(node: Node) -> torch.dtype:
    """The type in which a comparison of a node's inputs is made."""
    known = [_dtype(argument) for argument in node.args if isinstance(argument, fx.Node)]
    return functools.reduce(torch.promote_types, known)


def _elementwise(operator: str) -> Translation:
    def translate(emitter: Emitter, node: Node) -> str:
        dtype = _dtype(node)
        return emitter.add(operator, *(emitter.value(argument, dtype) for argument in node.args), output=node)

    return translate


def _comparison(operator: str) -> Translation:
    def translate(emitter: Emitter, node: Node) -> str:
        dtype = _widest(node)
        return emitter.add(operator, *(emitter.value(argument, dtype) for argument in node.args), output=node)

    return translate


def _scaled(operator: str) -> Translation:
    """Addition and subtraction with their factor `alpha`."""

    def translate(emitter: Emitter, node: Node) -> str:
        dtype = _dtype(node)
        left, right = (emitter.value(argument, dtype) for argument in node.args[:2])
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            right = emitter.add("Mul", right, emitter.value(alpha, dtype))
        return emitter.add(operator, left, right, output=node)

    return translate


def _reduction(operator: str) -> Translation:
    def translate(emitter: Emitter, node: Node) -> str:
        dims = node.args[1] if len(node.args) > 1 else None
        keep = bool(node.args[2]) if len(node.args) > 2 else False
        inputs = [emitter.value(node.args[0], _dtype(node))]
        if dims:
            inputs.append(_ints(emitter, [dims] if isinstance(dims, int) else dims))
        return emitter.add(operator, *inputs, output=node, keepdims=int(keep))

    return translate


def _reshape(emitter: Emitter, node: Node) -> str:
    old, new = _shape(node.args[0]), list(_shape(node))
    if old and new and old[0] == new[0] and 0 not in new:
        new[0] = 0  # means: as in the input
    return emitter.add("Reshape", emitter.value(node.args[0]), _ints(emitter, new), output=node)


def _transpose(emitter: Emitter, node: Node) -> str:
    count = len(_shape(node.args[0]))
    order = list(range(count))
    if node.target is aten.permute.default:
        order = [int(dim) % count for dim in node.args[1]]
    elif count > 1:
        first, second = (0, 1) if node.target is aten.t.default else (int(dim) % count for dim in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    return emitter.add("Transpose", emitter.value(node.args[0]), output=node, perm=order)


def _expand(emitter: Emitter, node: Node) -> str:
    return emitter.add("Expand", emitter.value(node.args[0]), _ints(emitter, _shape(node)), output=node)


def _copy(emitter: Emitter, node: Node) -> str:
    if _dtype(node) == node.args[0].meta["val"].dtype:
        return emitter.value(node.args[0])
    return emitter.add("Cast", emitter.value(node.args[0]), output=node, to=_ONNX_TYPES[_dtype(node)])


def _convolution(emitter: Emitter, node: Node) -> str:
    inputs, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    names = [emitter.value(argument) for argument in (inputs, weight, bias) if argument is not None]
    attributes = {
        "strides": list(stride),
        "pads": [*padding, *padding],
        "dilations": list(dilation),
        "group": groups,
        "kernel_shape": list(_shape(weight)[2:]),
    }
    if transposed:
        attributes["output_padding"] = list(output_padding)
    return emitter.add("ConvTranspose" if transposed else "Conv", *names, output=node, **attributes)


def _addmm(emitter: Emitter, node: Node) -> str:
    bias, left, right = (emitter.value(argument) for argument in node.args)
    factors = {name: float(node.kwargs.get(name, 1)) for name in ("alpha", "beta")}
    return emitter.add("Gemm", left, right, bias, output=node, **factors)


def _slice(emitter: Emitter, node: Node) -> str:
    given: list[Any] = list(node.args[1:])
    dim, start, end, step = given + [0, 0, None, 1][len(given) :]
    size = _shape(node.args[0])[dim]
    stop = size if end is None else min(end, size)
    bounds = [_ints(emitter, [number]) for number in (start or 0, stop, dim, step)]
    return emitter.add("Slice", emitter.value(node.args[0]), *bounds, output=node)


def _concatenate(emitter: Emitter, node: Node) -> str:
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    return emitter.add("Concat", *(emitter.value(part) for part in node.args[0]), output=node, axis=dim)


def _log_softmax(emitter: Emitter, node: Node) -> str:
    return emitter.add("LogSoftmax", emitter.value(node.args[0]), output=node, axis=node.args[1])


def _argmax(emitter: Emitter, node: Node) -> str:
    return emitter.add("ArgMax", emitter.value(node.args[0]), output=node, axis=node.args[1], keepdims=0)


def _clamp(emitter: Emitter, node: Node) -> str:
    result, dtype = emitter.value(node.args[0]), _dtype(node)
    low, high = (*node.args[1:], None, None)[:2]
    if low is not None:
        result = emitter.add("Max", result, emitter.value(low, dtype))
    return result if high is None else emitter.add("Min", result, emitter.value(high, dtype))


def _rsqrt(emitter: Emitter, node: Node) -> str:
    return emitter.add("Reciprocal", emitter.add("Sqrt", emitter.value(node.args[0])), output=node)


def _where(emitter: Emitter, node: Node) -> str:
    condition, yes, no = node.args
    dtype = _dtype(node)
    return emitter.add(
        "Where", emitter.value(condition), emitter.value(yes, dtype), emitter.value(no, dtype), output=node
    )


def _filled(emitter: Emitter, node: Node) -> str:
    """A tensor of one repeated number."""
    number = node.args[1] if node.target is aten.full.default else 0
    scalar: np.ndarray[Any, Any] = np.asarray(number, dtype=_NUMPY_TYPES[_dtype(node)])
    return emitter.add("Expand", emitter.constant(scalar), _ints(emitter, _shape(node)), output=node)


def _scalar(emitter: Emitter, node: Node) -> str:
    return emitter.constant(np.asarray(node.args[0], dtype=_NUMPY_TYPES[_dtype(node)]))


def _arange(emitter: Emitter, node: Node) -> str:
    return emitter.constant(np.arange(*node.args, dtype=_NUMPY_TYPES[_dtype(node)]))


_ELEMENTWISE = {
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
    "Neg": (aten.neg.default,),
    "Exp": (aten.exp.default,),
    "Log": (aten.log.default,),
    "Sqrt": (aten.sqrt.default,),
    "Abs": (aten.abs.default,),
    "Sign": (aten.sign.default,),
    "Relu": (aten.relu.default,),
    "Sigmoid": (aten.sigmoid.default,),
    "Tanh": (aten.tanh.default,),
    "MatMul": (aten.mm.default, aten.bmm.default),
}
_COMPARISONS = {
    "Equal": (aten.eq.Tensor, aten.eq.Scalar),
    "Greater": (aten.gt.Tensor, aten.gt.Scalar),
    "GreaterOrEqual": (aten.ge.Tensor, aten.ge.Scalar),
    "Less": (aten.lt.Tensor, aten.lt.Scalar),
    "LessOrEqual": (aten.le.Tensor, aten.le.Scalar),
}

OPERATORS: Mapping[Any, Translation] = MappingProxyType(
    {
        **{target: _elementwise(name) for name, targets in _ELEMENTWISE.items() for target in targets},
        **{target: _comparison(name) for name, targets in _COMPARISONS.items() for target in targets},
        **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _scaled("Add")),
        **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _scaled("Sub")),
        **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _reduction("ReduceSum")),
        **dict.fromkeys((aten.mean.default, aten.mean.dim), _reduction("ReduceMean")),
        **dict.fromkeys((aten.view.default, aten.unsqueeze.default, aten.squeeze.dims), _reshape),
        **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
        **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copy),  # noqa: SLF001 - the operator's name
        **dict.fromkeys((aten.full.default, aten.zeros.default), _filled),
        aten.expand.default: _expand,
        aten.convolution.default: _convolution,
        aten.addmm.default: _addmm,
        aten.slice.Tensor: _slice,
        aten.cat.default: _concatenate,
        aten._log_softmax.default: _log_softmax,  # noqa: SLF001 - the operator's name
        aten.argmax.default: _argmax,
        aten.clamp.default: _clamp,
        aten.rsqrt.default: _rsqrt,
        aten.where.self: _where,
        aten.scalar_tensor.default: _scalar,
        aten.arange.start_step: _arange,
        aten.arange.default: _arange,
    }
)
