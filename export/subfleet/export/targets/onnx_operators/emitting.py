"""Builds an ONNX graph from the translations of PyTorch's operators."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import fx

from subfleet.export.targets.instead import suggest_alternative
from subfleet.export.tracing import results_of
from subfleet.protocol.errors import ExportError

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


class Emitter:
    """An ONNX graph under construction: its nodes, its constants, and the name of each fx node's value.

    Args:
        operators: translations by operator.
        fusions: tried first; None leaves a node to its translation.
    """

    def __init__(
        self,
        operators: Mapping[object, "Translation"],
        fusions: Mapping[Any, "Callable[[Emitter, Any], str | None]"] = MappingProxyType({}),
    ) -> None:
        self._operators, self._fusions = operators, fusions
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._names: dict[fx.Node, str] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def bind(self, node: fx.Node, name: str) -> None:
        """Set the name of an fx node's value."""
        self._names[node] = name

    def add(
        self,
        operator: str,
        *inputs: str,
        output: fx.Node | None = None,
        outputs: Sequence[str] = (),
        **attributes: Any,
    ) -> str:
        """Append a node; return the name of its first output.

        Args:
            operator: of ONNX.
            *inputs: names; an empty one is an optional input that is left out.
            output: the node of this value, which keeps its name.
            outputs: all names, if there are several results; an empty one is not used.
            **attributes: of the operator.
        """
        self._count += 1
        names = list(outputs) or [f"v{self._count}" if output is None else output.name]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=f"n{self._count}", **attributes))
        return names[0]

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """Return the name of a node's value or of a number, converted if its type differs."""
        if not isinstance(argument, fx.Node):
            return self.constant(torch.tensor(argument, dtype=dtype).numpy())
        name = self._names[argument]
        if dtype is None or argument.meta["val"].dtype == dtype:
            return name
        return self.add("Cast", name, to=helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype))

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """Return the name of a constant; equal ones are written once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"c{len(self._constants)}"
            self._constants[key] = name
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return self._constants[key]

    def translate(self, graph: fx.GraphModule) -> tuple[list[fx.Node], list[str]]:
        """Append every node of a traced graph; return its result nodes, and the names of their values."""
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.bind(node, self.constant(getattr(graph, node.target).detach().numpy()))
            elif node.op == "call_function":
                self.bind(node, self._translate(node))
        results = results_of(graph)
        return results, [self._names[result] for result in results]

    def name_results(self, names: Mapping[str, str]) -> None:
        """Rename results: new name to old."""
        computed = {name for node in self.nodes for name in node.output}
        new_names: dict[str, str] = {}
        copies = []
        for new, old in names.items():
            if old in computed and old not in new_names:
                new_names[old] = new
            else:  # An input or a constant, or one value that is two results.
                copies.append(helper.make_node("Identity", [new_names.get(old, old)], [new]))
        for node in self.nodes:
            for given in (node.input, node.output):
                given[:] = [new_names.get(name, name) for name in given]
        # The runtime would copy what is both a result and read by other nodes, were the result a name of its own.
        self.nodes.extend(copies)

    def _translate(self, node: fx.Node) -> str:
        fusion = self._fusions.get(node.target)
        fused = None if fusion is None else fusion(self, node)
        if fused is not None:
            return fused
        translation = self._operators.get(node.target)
        if translation is None:
            raise ExportError(
                f"{node.target} (node {node.name!r}) cannot be translated to ONNX; {suggest_alternative(node.target)}"
            )
        return translation(self, node)


Translation = Callable[[Emitter, fx.Node], str]


def dtype_of(node: Node) -> torch.dtype:
    """Return the type of a node's value."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def ints(emitter: Emitter, values: Any) -> str:
    """Add integers as a constant."""
    return emitter.constant(np.asarray(values, dtype=np.int64))


def arguments(node: Node, *defaults: Any) -> list[Any]:
    """Return a node's arguments in order, given by position or by name, with defaults for those left out at the end."""
    given = list(node.args)
    schema = node.target._schema.arguments  # noqa: SLF001 - no public name
    for argument in [argument for argument in schema if not argument.kwarg_only][len(given) :]:
        if argument.name not in node.kwargs:
            break
        given.append(node.kwargs[argument.name])
    return given + list(defaults)[len(given) :]


def direct(operator: str, *inputs: int, axis: int | None = None) -> Translation:
    """Translate an operator with some arguments as inputs, and one as its axis, by their indices."""

    def translate(emitter: Emitter, node: Node) -> str:
        attributes = {} if axis is None else {"axis": node.args[axis]}
        return emitter.add(operator, *(emitter.value(node.args[index]) for index in inputs), output=node, **attributes)

    return translate
