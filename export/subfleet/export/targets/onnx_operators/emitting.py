"""What a translation of one PyTorch operator to ONNX is made of."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

__all__ = ["NUMPY_TYPES", "ONNX_TYPES", "Emitter", "Node", "Translation", "arguments", "dtype_of", "ints", "shape_of"]

ONNX_TYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float64: 11, torch.int32: 6}
)
NUMPY_TYPES: Mapping[torch.dtype, type] = MappingProxyType(
    {
        torch.float32: np.float32,
        torch.int64: np.int64,
        torch.bool: np.bool_,
        torch.float64: np.float64,
        torch.int32: np.int32,
    }
)

Node = Any
"""An `fx.Node`, whose arguments and metadata PyTorch leaves untyped."""


class Emitter(Protocol):
    """What a translation may ask of the graph that is being written."""

    def add(
        self, operator: str, *inputs: str, output: Node | None = None, outputs: Sequence[str] = (), **attributes: Any
    ) -> str:
        """Append a node; the name of its first output.

        Args:
            operator: of ONNX.
            *inputs: names; an empty one is an optional input that is left out.
            output: the node whose value this is, so that its name is kept.
            outputs: all names, where there are several results; an empty one is not wanted.
            **attributes: of the operator.
        """
        ...

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """The name of a node's value, or of a constant, converted to `dtype` where that differs."""
        ...

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """The name of a constant; equal ones are written once."""
        ...


Translation = Callable[[Emitter, fx.Node], str]


def dtype_of(node: Node) -> torch.dtype:
    """The type of a node's value."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def shape_of(node: Node) -> tuple[int, ...]:
    """The sizes of a node's value."""
    return tuple(int(size) for size in node.meta["val"].shape)


def ints(emitter: Emitter, values: Any) -> str:
    """Integers as a constant."""
    return emitter.constant(np.asarray(values, dtype=np.int64))


def arguments(node: Node, *defaults: Any) -> list[Any]:
    """A node's arguments in order, by position or by name, with these values for those left out at the end."""
    given = list(node.args)
    schema = node.target._schema.arguments  # noqa: SLF001 - no public name
    for argument in [argument for argument in schema if not argument.kwarg_only][len(given) :]:
        if argument.name not in node.kwargs:
            break
        given.append(node.kwargs[argument.name])
    return given + list(defaults)[len(given) :]
