"""XNNPACK's graph, as ExecuTorch's delegate reads it, built value by value and node by node.

It is written as bytes: ExecuTorch's flat buffer after a header. ExecuTorch's own writer looks up the types of every
object's fields again and again, which takes ten times as long as everything else. Its compiler still creates the flat
buffer from its schema.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx

_ALIGNMENT = 16
_UNIONS = ("xnode_union", "xvalue_union")


def _fields(part: Any) -> dict[str, Any]:
    """Return a part of the graph as the flat buffer's compiler reads it: a union names its type."""
    fields = vars(part)
    # The compiler must know the type before it reads the value.
    types = {f"{name}_type": type(fields[name]).__name__ for name in _UNIONS if name in fields}
    return {**types, **fields}


def _flat_buffer(graph: Any) -> bytes:
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize
    from executorch.exir._serialize._flatbuffer import _flatc_compile

    schema = Path(xnnpack_graph_serialize.__file__).parent / "schema.fbs"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "graph.json"
        text.write_text(json.dumps(graph, default=_fields), encoding="ascii")
        _flatc_compile(folder, str(schema), str(text))
        return text.with_suffix(".bin").read_bytes()


def _align(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % _ALIGNMENT)


def _serialise_graph(graph: Any) -> bytes:
    """Serialise a graph without constants of its own for the delegate."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader

    body = _flat_buffer(graph)
    start = len(_align(b"\0" * XNNHeader.EXPECTED_LENGTH))
    end = start + len(_align(body))
    header = XNNHeader(
        flatbuffer_offset=start, flatbuffer_size=len(body), constant_data_offset=end, constant_data_size=0
    )
    return _align(header.to_bytes()) + _align(body)


_NO_VALUE = 0xFFFFFFFF
_EXTERNAL_INPUT = 1
_EXTERNAL_OUTPUT = 2
_BY_NAME = 2**64 - 1
_TRANSPOSE_B = 0x1
"""The second factor of a product is transposed in memory."""
_KEEP_DIMS = 0x40
_MOST_PARTS = 5

Shape = tuple[int, ...]


class XnnpackGraph:
    """The graph of a region under construction; values are numbered in order.

    A tensor without dimensions is one with a single dimension of size 1.
    """

    def __init__(self) -> None:
        from executorch.backends.xnnpack.serialization import xnnpack_graph_schema

        self._schema: ModuleType = xnnpack_graph_schema
        self._nodes: list[Any] = []
        self._values: list[Any] = []
        self._shapes: list[Shape] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._constants: list[Any] = [xnnpack_graph_schema.ConstantDataOffset(0, 0)]
        self._constant_values: dict[tuple[Shape, bytes], int] = {}
        self._bound: dict[fx.Node, int] = {}
        self._names: dict[int, str] = {}
        self.stored: dict[str, bytes] = {}
        self.packed: list[tuple[int, int]] = []
        """Rows and columns of constant factors, which products lay out in an order of their own, with a bias."""

    def bind(self, node: fx.Node, value: int) -> None:
        """Assign a node its value."""
        self._bound[node] = value

    def value(self, argument: Any) -> int:
        """Return the value of a node or of a number."""
        return self._bound[argument] if isinstance(argument, fx.Node) else self.constant(float(argument))

    def shape(self, value: int) -> Shape:
        """Return the shape of a value."""
        return self._shapes[value]

    def input(self, shape: Sequence[int]) -> int:
        """Add a value that the caller provides."""
        self._inputs.append(self._add_value(shape))
        return self._inputs[-1]

    def output(self, value: int) -> None:
        """Return a value to the caller."""
        self._outputs.append(value)

    def constant(self, array: "np.typing.ArrayLike", shape: Sequence[int] = (1,)) -> int:
        """Add a constant, repeated to a shape; return its value."""
        filled = np.broadcast_to(np.asarray(array, dtype=np.float32), tuple(shape))
        content = np.ascontiguousarray(filled).tobytes()
        key = (tuple(shape), content)
        if key not in self._constant_values:
            name = hashlib.sha256(content).hexdigest()
            self.stored[name] = content
            number = len(self._constants)
            offset = self._schema.ConstantDataOffset(offset=_BY_NAME, size=len(content), named_key=name)
            self._constants.append(offset)
            self._constant_values[key] = self._add_value(shape, number)
            self._names[self._constant_values[key]] = name
        return self._constant_values[key]

    def is_constant(self, value: int) -> bool:
        """Return whether a value is a constant."""
        return value in self._names

    def stored_name(self, value: int) -> str:
        """Return the name by which a constant is stored, the same for other shapes of its numbers; empty for others."""
        return self._names.get(value, "")

    def unary(
        self,
        kind: str,
        x: int,
        *,
        shape: Shape | None = None,
        flags: int = 0,
        limits: tuple[float, float] | None = None,
    ) -> int:
        """Add a node of one input, such as "Exp"."""
        return self._add(kind, self._shapes[x] if shape is None else shape, limits, input_id=x, flags=flags)

    def binary(self, kind: str, a: int, b: int) -> int:
        """Add an elementwise node of two inputs, such as "Add"; either may be broadcast."""
        shape = np.broadcast_shapes(self._shapes[a], self._shapes[b])
        return self._add(kind, shape, input1_id=a, input2_id=b)

    def scale(self, value: int, factor: float) -> int:
        """Multiply a value by a number."""
        return value if factor == 1.0 else self.binary("Multiply", value, self.constant(factor))

    def product(self, a: int, b: int, *, transpose_b: bool = False) -> int:
        """Multiply (..., M, K) by (..., K, N), or by (..., N, K) if the second factor is transposed in memory."""
        columns = self._shapes[b][-2 if transpose_b else -1]
        if self.is_constant(b):
            copies, rows = math.prod(self._shapes[b][:-2]), self._shapes[a][-1]
            self.packed.append((copies * (rows + 1), columns))
        flags = _TRANSPOSE_B if transpose_b else 0
        shape = (*self._shapes[a][:-1], columns)
        return self._add("BatchMatrixMultiply", shape, input1_id=a, input2_id=b, flags=flags)

    def linear(self, x: int, weight: int, bias: int) -> int:
        """Multiply (M, K) by (K, N), and add a bias (N,)."""
        shape = (*self._shapes[x][:-1], self._shapes[weight][1])
        return self._add("FullyConnected", shape, input1_id=x, filter_id=weight, bias_id=bias, flags=_TRANSPOSE_B)

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        """Change the shape; takes no time between two nodes."""
        dims = tuple(shape) or (1,)
        if dims == self._shapes[x]:
            return x
        return self._add("StaticReshape", dims, num_dims=len(dims), new_shape=list(dims), input_id=x)

    def transpose(self, x: int, dims: Sequence[int]) -> int:
        """Copy a value with its dimensions in another order."""
        shape = [self._shapes[x][dim] for dim in dims]
        return self._add("StaticTranspose", shape, num_dims=len(dims), perm=list(dims), input_id=x)

    def slice(self, x: int, offsets: Sequence[int], sizes: Sequence[int]) -> int:
        """Cut out a part."""
        box: dict[str, Any] = {"num_dims": len(sizes), "offsets": list(offsets), "sizes": list(sizes)}
        return self._add("StaticSlice", sizes, **box, input_id=x)

    def pad(self, x: int, before: Sequence[int], after: Sequence[int], fill: float) -> int:
        """Pad with a constant."""
        sizes = [low + size + high for low, size, high in zip(before, self._shapes[x], after, strict=True)]
        padding: dict[str, Any] = {"pre_paddings": list(before), "post_paddings": list(after), "padding_value": fill}
        return self._add("StaticConstantPad", sizes, **padding, input_id=x)

    def concatenate(self, parts: Sequence[int], axis: int) -> int:
        """Concatenate parts; a node takes at most five."""
        while len(parts) > _MOST_PARTS:
            groups = [parts[i : i + _MOST_PARTS] for i in range(0, len(parts), _MOST_PARTS)]
            parts = [self.concatenate(group, axis) for group in groups]
        if len(parts) == 1:
            return parts[0]
        sizes = list(self._shapes[parts[0]])
        sizes[axis] = sum(self._shapes[part][axis] for part in parts)
        given = [*parts, *[_NO_VALUE] * (_MOST_PARTS - len(parts))]
        inputs: dict[str, Any] = {f"input{number}_id": part for number, part in enumerate(given, start=1)}
        return self._add(f"Concatenate{len(parts)}", sizes, axis=axis, **inputs)

    def mean_over_middle(self, x_nhwc: int) -> int:
        """Reduce (N, H, W, C) to (N, 1, 1, C)."""
        samples, _, _, channels = self._shapes[x_nhwc]
        return self.unary("GlobalAvgPooling2d", x_nhwc, shape=(samples, 1, 1, channels), flags=_KEEP_DIMS)

    def maximum_over_rows(self, x_nhwc: int) -> int:
        """Reduce (N, H, 1, C) to (N, 1, 1, C)."""
        samples, height, _, channels = self._shapes[x_nhwc]
        return self._add(
            "MaxPooling2d", (samples, 1, 1, channels), input_id=x_nhwc, padding_top=0, padding_right=0,
            padding_bottom=0, padding_left=0, pooling_height=height, pooling_width=1, stride_height=height,
            stride_width=1, dilation_height=1, dilation_width=1,
        )  # fmt: skip

    def _add_value(self, shape: Sequence[int], constant: int = 0) -> int:
        """Add a value of a shape; `constant` is the number of its constant, or 0."""
        number = len(self._values)
        dims = [int(size) for size in shape] or [1]
        tensor = self._schema.XNNTensorValue(
            datatype=self._schema.XNNDatatype.xnn_datatype_fp32,
            num_dims=len(dims),
            dims=dims,
            constant_buffer_idx=constant,
            external_id=_NO_VALUE,
            flags=0,
            id_out=number,
        )
        self._values.append(self._schema.XValue(xvalue_union=tensor))
        self._shapes.append(tuple(dims))
        return number

    def _add(
        self,
        kind: str,
        shape: Sequence[int],
        limits: tuple[float, float] | None = None,
        *,
        flags: int = 0,
        **fields: Any,
    ) -> int:
        """Add a node with one output of a shape, and return its value.

        Args:
            kind: of node, such as "Exp".
            shape: of the output.
            limits: bounds to which the output is clamped.
            flags: of the node.
            **fields: further fields of the node.
        """
        output = self._add_value(shape)
        node = getattr(self._schema, f"XNN{kind}")(output_id=output, flags=flags, **fields)
        bounds = None
        if limits is not None:
            low, high = (limit if np.isfinite(limit) else str(limit) for limit in limits)
            bounds = self._schema.OutputMinMax(low, high)
        self._nodes.append(self._schema.XNode(xnode_union=node, debug_handle=len(self._nodes), output_min_max=bounds))
        return output

    def calls(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield the kind, inputs and output of every node, in order."""
        for node in self._nodes:
            fields = vars(node.xnode_union)
            inputs = (value for name, value in fields.items() if _is_input(name) and value != _NO_VALUE)
            yield type(node.xnode_union).__name__.removeprefix("XNN"), tuple(inputs), fields["output_id"]

    def serialise(self) -> bytes:
        """Serialise the graph for the delegate."""
        for number, (value, flag) in enumerate(
            [*((i, _EXTERNAL_INPUT) for i in self._inputs), *((i, _EXTERNAL_OUTPUT) for i in self._outputs)]
        ):
            tensor = self._values[value].xvalue_union
            tensor.external_id, tensor.flags = number, flag
        graph = self._schema.XNNGraph(
            version="0",
            xnodes=self._nodes,
            xvalues=self._values,
            num_externs=len(self._inputs) + len(self._outputs),
            input_ids=list(self._inputs),
            output_ids=list(self._outputs),
            constant_data=self._constants,
        )
        return _serialise_graph(graph)


def _is_input(field: str) -> bool:
    """Return whether a field of a node names a value that it reads."""
    return field.endswith("_id") and field != "output_id"


_MOST_DIMS = 6


def is_floating(node: fx.Node) -> bool:
    """Return whether a node's tensor fits XNNPACK: single precision, at most six dimensions, not empty."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float32 and value.dim() <= _MOST_DIMS and value.numel() > 0


Rule = Callable[[XnnpackGraph, fx.Node], int]
