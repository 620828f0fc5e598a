"""Records the operators that a function applies to tensors, while it runs on shapes alone.

PyTorch's own tracer (`make_fx`) follows any function, with proxies for sizes and numbers and several dispatch modes per
call. A function that changes nothing in place and reads no number only needs a list of its operators, which takes a
quarter of the time.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx._lazy_graph_module import _LazyGraphModule  # code that nothing runs is not written
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from subfleet.export.canonical.checks import is_functional
from subfleet.export.nodes import append_call

LOOKS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default})  # noqa: SLF001 - its name
"""Operators that read a number from a tensor."""
_MOST_NUMBERS = 10_000_000
"""The largest tensor that is computed for that."""


class KnownValues:
    """Tensors that depend on constants only, and the calls that compute them.

    While only shapes are traced, networks read some numbers that depend on no input: whether the positions that they
    count increase, or whether a mask masks anything. Only what is read is computed.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Any, Any, Any, int | None]] = {}
        self._alive: list[Tensor] = []  # a tensor is known by its identity
        self._found: dict[int, Tensor] = {}

    def hold(self, stand_in: Tensor, tensor: Tensor) -> None:
        """Register the real tensor that a tensor without numbers stands for."""
        self._found[id(stand_in)] = tensor
        self._alive.append(stand_in)

    def record(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the results of a call whose inputs are known, and forget tensors that it changes in place."""
        inputs = _tensors_in((args, dict(kwargs)))
        if func._schema.is_mutable:  # noqa: SLF001 - no other way to it
            for tensor in inputs:
                self._calls.pop(id(tensor), None)
                self._found.pop(id(tensor), None)
            return
        if torch.Tag.nondeterministic_seeded in func.tags or not all(self._is_known(item) for item in inputs):
            return
        results = result if isinstance(result, (tuple, list)) else [result]
        for index, item in enumerate(results):
            if isinstance(item, Tensor) and item.numel() <= _MOST_NUMBERS:
                self._calls[id(item)] = func, args, dict(kwargs), index if item is not result else None
                self._alive.append(item)

    def read(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number in a tensor; None if it depends on an input."""
        if not self._is_known(tensor):
            return None
        with unset_fake_temporarily(), _disable_current_modes():
            return self._compute(tensor).item()

    def _is_known(self, tensor: Tensor) -> bool:
        is_real = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
        return is_real or id(tensor) in self._calls or id(tensor) in self._found

    def _compute(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._calls and id(tensor) not in self._found:
            return tensor
        if id(tensor) not in self._found:
            func, args, kwargs, index = self._calls[id(tensor)]
            args, kwargs = _map_tensors((args, kwargs), self._compute)
            result = func(*args, **{**kwargs, **({"device": torch.device("cpu")} if "device" in kwargs else {})})
            self._found[id(tensor)] = result if index is None else result[index]
        return self._found[id(tensor)]


def _tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    fx.node.map_aggregate(value, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
    return tensors


_SHAPES, _NUMBERS = torch.device("meta"), torch.device("cpu")
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - PyTorch tells it nowhere else


def record(
    run: Callable[..., Any], example: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]] = MappingProxyType({})
) -> fx.GraphModule:
    """Record every operator that a function applies.

    Args:
        run: takes tensors; returns tensors, or lists and tuples of tensors.
        example: tensors of the right shapes and types; their numbers are not read.
        table: replacements by operator; NotImplemented leaves the call unchanged.

    Returns:
        A graph whose nodes carry a fake tensor of their shape and type in `meta["val"]`. Tensors with numbers that the
        function reads are attributes of it.

    Raises:
        ValueError: the function creates a tensor of numbers itself.
    """
    tape = _Tape(table)
    given = [tape.input(_shape_only(tensor)) for tensor in example]
    with tape:
        results = run(*given)
    tape.graph.output(_map_tensors(results, tape.node_of))
    mode = next((tensor.fake_mode for tensor in example if isinstance(tensor, FakeTensor)), None) or FakeTensorMode()
    fakes: dict[Any, FakeTensor] = {}

    def fake(shape: Tensor) -> FakeTensor:
        key = _describe(shape)
        if key not in fakes:
            fakes[key] = FakeTensor(mode, shape, _NUMBERS)
        return fakes[key]

    for node in tape.graph.nodes:
        node.meta.update(_map_tensors(node.meta, fake))
    return _LazyGraphModule(tape.root, tape.graph)


def trace_functional(
    run: Callable[..., Any], shapes: Sequence[Tensor], example: Callable[[], Sequence[Tensor]]
) -> fx.GraphModule:
    """Trace any function; nothing in the graph changes a tensor in place.

    Args:
        run: as in `record`.
        shapes: as `example` in `record`.
        example: tensors with numbers, for PyTorch's own tracer, which follows more functions and explains what it
            cannot.
    """
    with contextlib.suppress(Exception):
        graph = record(run, shapes)
        if is_functional(graph):
            return graph
    return trace_with_pytorch(run, example())


def trace_with_pytorch(run: Callable[..., Any], example: Sequence[Tensor]) -> fx.GraphModule:
    """Trace any function with PyTorch's own tracer: a change in place becomes a new tensor."""
    functional = dispatch_functionalize(run, FunctionalTensorMode())
    return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call] # of PyTorch's
    """Records every operator that is called while it is active."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # likewise
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self._table = table
        self._nodes: dict[int, fx.Node] = {}
        self._held: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []  # a tensor is known by its identity
        self._known_values = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and each call would be wrapped

    def input(self, shape: Tensor) -> Tensor:
        """Add an input of the function."""
        self._bind(shape, self.graph.placeholder(f"arg{len(self._alive)}_1"))
        return shape

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor."""
        return self._nodes[id(self._resolve(tensor))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call, or the calls of its replacement."""
        options = dict(kwargs or {})
        instead = [self._table[func]] if func in self._table else []
        if _traits_of(func)[0]:
            instead.append(func.decompose)
        for simpler in instead:
            with self:
                result = simpler(*args, **options)
            if result is not NotImplemented:
                return result
        options.pop("device", None)
        if func in LOOKS and (number := self._known_values.read(args[0])) is not None:
            return number
        args, options = _map_tensors(args, self._resolve), _map_tensors(options, self._resolve)
        given = _map_tensors(args, self.node_of), _map_tensors(options, self.node_of)
        node = append_call(self.graph, func, *given, name=func.overloadpacket.__name__)
        result = self._run_operator(func, args, options)
        self._known_values.record(func, args, options, result)
        if isinstance(result, Tensor):
            self._bind(result, node)
            return result
        node.meta["val"] = result
        for index, item in enumerate(result or ()):
            if isinstance(item, Tensor):
                self._bind(item, self.graph.call_function(operator.getitem, (node, index)))
        return result

    def _run_operator(self, func: Any, args: Any, options: Any) -> Any:
        """Run a call on shapes."""
        _, takes_device, aliases = _traits_of(func)
        if takes_device:
            options = {**options, "device": _SHAPES}
        if aliases:
            return func(*args, **options)
        description = _describe(args), _describe(options)
        # Copies, as a result that is kept must keep no graph of autograd.
        args, options = _map_tensors(args, _shape_only), _map_tensors(options, _shape_only)
        call = _ShapeCall(function=func, description=description, args=args, options=options)
        return _map_tensors(_run_on_shapes(call), _shape_only)

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _resolve(self, tensor: Tensor) -> Tensor:
        """Return a tensor without numbers: the tensor itself, or the stand-in of one from outside."""
        if id(tensor) in self._nodes:
            return tensor
        if id(tensor) not in self._held:
            if tensor.device == _SHAPES:
                raise ValueError("the function creates a tensor with fixed values, which tracing on shapes loses")
            name = f"_tensor_constant{len(self._held)}"
            self.root.register_buffer(name, tensor)
            self._held[id(tensor)] = _shape_only(tensor)
            self._bind(self._held[id(tensor)], self.graph.get_attr(name))
            self._known_values.hold(self._held[id(tensor)], tensor)
            self._alive.append(tensor)
        return self._held[id(tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeCall:
    """A call on tensors without numbers; calls are equal if their results are."""

    function: Any
    description: Any
    args: Any = field(compare=False)
    options: Any = field(compare=False)


@lru_cache(maxsize=4096)
def _run_on_shapes(call: _ShapeCall) -> Any:
    """Run a call. PyTorch is slow at computing shapes, and most calls are like an earlier one, also of other steps."""
    return call.function(*call.args, **call.options)


@cache
def _traits_of(func: Any) -> tuple[bool, bool, bool]:
    """Return whether an operator decomposes, takes a device, and returns or changes memory of its inputs."""
    schema: Any = func._schema  # noqa: SLF001 - the operator's description
    decomposes = func._can_decompose() and not _has_kernel(func.name(), "CPU")  # noqa: SLF001 - as PyTorch's tracer does
    takes_device = any(argument.name == "device" for argument in schema.arguments)
    return decomposes, takes_device, any(argument.alias_info for argument in schema.arguments)


def _shape_only(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_SHAPES)


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a nested value with its tensors replaced."""
    return fx.node.map_aggregate(value, lambda item: change(item) if isinstance(item, Tensor) else item)


def _describe(value: Any) -> Any:
    """Return a hashable description of everything that a call's result depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_describe, value))
    if isinstance(value, dict):
        return tuple((name, _describe(item)) for name, item in value.items())
    return type(value), value
