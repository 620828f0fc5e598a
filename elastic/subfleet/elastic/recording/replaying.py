"""Builds a module of any size from a recorded network."""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.recording.functions import list_functions
from subfleet.elastic.recording.record import NetworkRecord
from subfleet.elastic.recording.sizes import compute_size
from subfleet.protocol.errors import ConfigError


class _Layer(nn.Module):
    """A layer of the recorded module: it holds its tensors, and runs the calls that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.own_sizes: dict[str, tuple[int, ...]] = {}

    def forward(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


class ReplayedModule(nn.Module):
    """A recorded network with given sizes. Names of its tensors are those of the recorded module.

    Args:
        record: the network.
        sizes: number of kept indices by axis and sum.
        parts: names of the kept blocks.
    """

    own_sizes: dict[str, tuple[int, ...]]

    def __init__(self, record: NetworkRecord, sizes: Mapping[str, int], parts: frozenset[str]) -> None:
        super().__init__()
        self.own_sizes = {}
        self._record, self._parts = record, parts
        self._sizes = {name: int(size) for name, size in sizes.items()}
        dropped = tuple(f"{name}." for name in record.training.blocks if name not in parts)
        for tensor in record.tensors:
            if tensor.name.startswith(dropped):
                continue
            layer, _, own = tensor.name.rpartition(".")
            holder = self._add_layer(layer)
            shape = tuple(compute_size(size, sizes) for size in tensor.shape)
            values = torch.empty(tuple(map(int, shape)))
            if tensor.parameter or not tensor.trained:  # what is frozen needs no output in programs
                holder.register_parameter(own, nn.Parameter(values, requires_grad=tensor.trained))
            else:
                holder.register_buffer(own, values)
            holder.own_sizes[own] = shape
        for name, *encoded in record.fixed:
            if not name.startswith(dropped):
                layer, _, own = name.rpartition(".")
                # A plain attribute: constants are in no state, and may be integers.
                setattr(self._add_layer(layer), own, _decode_tensor(*encoded))
        for mode, plan in (("training", record.training), ("evaluation", record.evaluation)):
            for number, encoded in enumerate(plan.constants):
                setattr(self, f"{mode}_constant{number}", _decode_tensor(*encoded))
        for call in (*record.training.calls, *record.evaluation.calls):
            if not f"{call[4]}.".startswith(dropped):
                self._add_layer(call[4])

    def _add_layer(self, path: str) -> "_Layer | ReplayedModule":
        layer: Any = self
        for name in path.split(".") if path else ():
            if name not in layer._modules:  # noqa: SLF001 - names such as "add" are attributes of modules
                layer._modules[name] = _Layer()  # noqa: SLF001
            layer = layer._modules[name]  # noqa: SLF001
        found: _Layer | ReplayedModule = layer
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Make the calls of the recorded run."""
        plan = self._record.training if self.training else self._record.evaluation
        call = _Replay(self, inputs)
        skips = {
            start: (stop, source, out)
            for name, (start, stop, source, out) in plan.blocks.items()
            if name not in self._parts and name in self._record.training.blocks
        }
        position = 0
        while position < len(plan.calls):
            if position in skips:
                position, source, out = skips[position]
                call.values[out] = call.values[source]
                continue
            call.make(plan.calls[position])
            position += 1
        return call.values[plan.out]

    def find_layer(self, path: str) -> Any:
        """The layer with a path."""
        layer: Any = self
        for name in path.split(".") if path else ():
            layer = layer._modules[name]  # noqa: SLF001
        return layer

    def find_tensor(self, name: str) -> Tensor:
        """A parameter or buffer."""
        layer, _, own = name.rpartition(".")
        tensor: Tensor = getattr(self.find_layer(layer), own)
        return tensor

    def find_constant(self, number: int) -> Tensor:
        """A tensor that neither the recorded module nor its calls own."""
        tensor: Tensor = getattr(self, f"{'training' if self.training else 'evaluation'}_constant{number}")
        return tensor

    def compute_size(self, size: Any, batch: int) -> int:
        """A size in this module."""
        return int(compute_size(size, self._sizes, batch))


class _Replay:
    """The results of a run so far."""

    def __init__(self, module: ReplayedModule, inputs: Tensor) -> None:
        self._module = module
        self._functions = list_functions()
        self.values: dict[int, Tensor] = {0: inputs}
        self._decoders: Mapping[str, Callable[[Any], Any]] = {
            "value": self.values.__getitem__,
            "state": lambda name: module.find_tensor(name).to(inputs.device),
            "constant": lambda number: module.find_constant(number).to(inputs.device),
            "size": lambda size: module.compute_size(size, len(inputs)),
            "tuple": lambda items: tuple(map(self._decode, items)),
            "slice": lambda bounds: slice(*map(self._decode, bounds)),
            "dtype": _read_type,
            "device": lambda _: inputs.device,
            "float": float,
            "ellipsis": lambda _: Ellipsis,
            "dict": lambda pairs: {key: self._decode(item) for key, item in pairs},
        }

    def make(self, call: list[Any]) -> None:
        """Make a recorded call, and keep its results."""
        name, args, kwargs, numbers, layer = call
        if name not in self._functions:
            raise ConfigError(f"layer {layer!r} calls {name}, which a recorded network cannot call")
        given = [self._decode(item) for item in args], {key: self._decode(item) for key, item in kwargs.items()}
        path = self._module.find_layer(layer)
        function = self._functions[name]
        out = path(function, *given) if isinstance(path, _Layer) else function(*given[0], **given[1])
        for number, result in zip(numbers, out, strict=True) if isinstance(numbers, list) else [(numbers, out)]:
            if number is not None:
                self.values[number] = result

    def _decode(self, value: Any) -> Any:
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            return self._decoders[kind](content)
        return [self._decode(item) for item in value] if isinstance(value, list) else value


def _read_type(name: str) -> torch.dtype:
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"a recorded network has the type {name!r:.80}, which is none of PyTorch's; record it again")
    return kind


def _decode_tensor(dtype: str, shape: list[int], content: str) -> Tensor:
    """Decode what `subfleet.elastic.recording.encoding.encode_tensor` encoded."""
    numbers = bytearray(base64.b85decode(content))
    kind = _read_type(dtype)
    return torch.frombuffer(numbers, dtype=kind).reshape(shape) if numbers else torch.empty(shape, dtype=kind)
