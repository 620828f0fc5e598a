"""Elementwise operators and comparisons."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from subfleet.export.nodes import shape_of
from subfleet.export.targets.onnx_operators.emitting import (
    NUMPY_TYPES,
    ONNX_TYPES,
    Emitter,
    Node,
    Translation,
    arguments,
    dtype_of,
    ints,
)

aten = torch.ops.aten


def _common_type(node: Node) -> torch.dtype:
    """Return the type in which a node's inputs are compared."""
    known = [dtype_of(argument) for argument in node.args if isinstance(argument, fx.Node)]
    return functools.reduce(torch.promote_types, known)


def _operands(emitter: Emitter, given: Sequence[Any], dtype: torch.dtype) -> list[str]:
    """Return the names of the operands of an elementwise operator.

    A single number gets the rank of the others if their last size is 1: otherwise ONNX Runtime processes such a tensor
    element by element, 25 times slower (measured).
    """
    shapes = [shape_of(argument) if isinstance(argument, fx.Node) else () for argument in given]
    longest = max(shapes, key=len)
    names = []
    for argument, shape in zip(given, shapes, strict=True):
        if longest[-1:] != (1,) or len(shape) == len(longest) or math.prod(shape) != 1:
            names.append(emitter.value(argument, dtype))
        elif isinstance(argument, fx.Node):
            ones = ints(emitter, [1] * len(longest))
            names.append(emitter.add("Reshape", emitter.value(argument, dtype), ones))
        else:
            names.append(emitter.constant(np.full((1,) * len(longest), argument, dtype=NUMPY_TYPES[dtype])))
    return names


def _combine(operator: str, dtype: Callable[[Node], torch.dtype]) -> Translation:
    """Translate an operator that combines its arguments element by element, in a type that follows from the node."""

    def translate(emitter: Emitter, node: Node) -> str:
        return emitter.add(operator, *_operands(emitter, node.args, dtype(node)), output=node)

    return translate


def _with_alpha(operator: str) -> Translation:
    """Translate addition or subtraction with its factor `alpha`."""

    def translate(emitter: Emitter, node: Node) -> str:
        dtype = dtype_of(node)
        left, right = _operands(emitter, node.args[:2], dtype)
        alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
        if alpha != 1:
            right = emitter.add("Mul", right, emitter.value(alpha, dtype))
        if node.target is aten.rsub.Scalar:
            left, right = right, left
        return emitter.add(operator, left, right, output=node)

    return translate


def _copy(emitter: Emitter, node: Node) -> str:
    if dtype_of(node) == node.args[0].meta["val"].dtype:
        return emitter.value(node.args[0])
    return emitter.add("Cast", emitter.value(node.args[0]), output=node, to=ONNX_TYPES[dtype_of(node)])


def _clamp(emitter: Emitter, node: Node) -> str:
    x, low, high = arguments(node, None, None, None)
    if node.target is aten.clamp_max.default:
        low, high = None, low
    dtype = dtype_of(node)
    bounds = ["" if bound is None else emitter.value(bound, dtype) for bound in (low, high)]
    return emitter.add("Clip", emitter.value(x, dtype), *bounds, output=node)


def _rsqrt(emitter: Emitter, node: Node) -> str:
    return emitter.add("Reciprocal", emitter.add("Sqrt", emitter.value(node.args[0])), output=node)


def _leaky_relu(emitter: Emitter, node: Node) -> str:
    x, slope = arguments(node, None, 0.01)
    return emitter.add("LeakyRelu", emitter.value(x), output=node, alpha=float(slope))


def _hardsigmoid(emitter: Emitter, node: Node) -> str:
    return emitter.add("HardSigmoid", emitter.value(node.args[0]), output=node, alpha=1 / 6, beta=0.5)


def _choose(condition: int, yes: int, no: int) -> Translation:
    """Translate a choice between two arguments by a third, by their indices."""

    def translate(emitter: Emitter, node: Node) -> str:
        branches = (emitter.value(node.args[index], dtype_of(node)) for index in (yes, no))
        return emitter.add("Where", emitter.value(node.args[condition]), *branches, output=node)

    return translate


def _plain(operator: str, dtype: Callable[[Node], torch.dtype]) -> Translation:
    """Translate an operator as `_combine`, with numbers as they are."""

    def translate(emitter: Emitter, node: Node) -> str:
        names = (emitter.value(argument, dtype(node)) for argument in node.args)
        return emitter.add(operator, *names, output=node)

    return translate


def _not_equal(emitter: Emitter, node: Node) -> str:
    dtype = _common_type(node)
    equal = emitter.add("Equal", *(emitter.value(argument, dtype) for argument in node.args))
    return emitter.add("Not", equal, output=node)


_BY_NAME = {
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
    "Neg": (aten.neg.default,),
    "Exp": (aten.exp.default,),
    "Log": (aten.log.default,),
    "Sqrt": (aten.sqrt.default,),
    "Reciprocal": (aten.reciprocal.default,),
    "Abs": (aten.abs.default,),
    "Sign": (aten.sign.default, aten.sgn.default),
    "Erf": (aten.erf.default,),
    "Sin": (aten.sin.default,),
    "Cos": (aten.cos.default,),
    "Floor": (aten.floor.default,),
    "Ceil": (aten.ceil.default,),
    "Round": (aten.round.default,),
    "Relu": (aten.relu.default,),
    "Sigmoid": (aten.sigmoid.default,),
    "Tanh": (aten.tanh.default,),
    "Max": (aten.maximum.default,),
    "Min": (aten.minimum.default,),
}
_COMPARISONS = {
    "Equal": (aten.eq.Tensor, aten.eq.Scalar),
    "Greater": (aten.gt.Tensor, aten.gt.Scalar),
    "GreaterOrEqual": (aten.ge.Tensor, aten.ge.Scalar),
    "Less": (aten.lt.Tensor, aten.lt.Scalar),
    "LessOrEqual": (aten.le.Tensor, aten.le.Scalar),
}
_LOGICALS = {
    "And": (aten.logical_and.default,),
    "Or": (aten.logical_or.default,),
    "Xor": (aten.logical_xor.default,),
    "Not": (aten.logical_not.default,),
}

ELEMENTWISE: Mapping[object, Translation] = MappingProxyType(
    {
        **{target: _combine(name, dtype_of) for name, targets in _BY_NAME.items() for target in targets},
        **{target: _combine(name, _common_type) for name, targets in _COMPARISONS.items() for target in targets},
        **{target: _plain(name, lambda _node: torch.bool) for name, targets in _LOGICALS.items() for target in targets},
        **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _not_equal),
        **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _with_alpha("Add")),
        **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar), _with_alpha("Sub")),
        **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copy),  # noqa: SLF001 - the operator's name
        **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamp),
        **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar), _plain("Pow", dtype_of)),
        **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _choose(1, 2, 0)),
        aten.rsqrt.default: _rsqrt,
        aten.leaky_relu.default: _leaky_relu,
        aten.hardsigmoid.default: _hardsigmoid,
        aten.where.self: _choose(0, 1, 2),
    }
)
