"""Writes the calls of a run as plain data, with sizes as expressions of axes.

A value is JSON: numbers, texts, None and lists stand for themselves, and an object with one key for everything else:
"value" (a result, by its number), "state" (a tensor of the module), "constant" (another tensor), "size", "whole" (a
size of the whole network), "tuple", "slice", "dtype", "float", "dict", "device" or "ellipsis".
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subfleet.elastic.recording.calls import Call
from subfleet.elastic.recording.dimensions import Leaf
from subfleet.elastic.recording.functions import list_functions
from subfleet.elastic.recording.run import ModuleRun, ModuleRuns
from subfleet.elastic.recording.sized_calls import SIZED
from subfleet.elastic.recording.sizes import express
from subfleet.protocol.errors import ConfigError

Plain = Any
"""Plain data."""

_DROPPED = frozenset({"device", "layout", "memory_format", "pin_memory"})
MOST_CONSTANTS = 2**16
"""Numbers of a tensor that a record holds."""


class CallEncoder:
    """Encodes the calls of a run.

    Args:
        runs: the runs of a module.
        run: one of them.
        names: names of the axes by leaf.

    Attributes:
        constants: tensors that neither the module nor its calls own, see `encode_tensor`.
    """

    def __init__(self, runs: ModuleRuns, run: ModuleRun, names: Mapping[Leaf, str]) -> None:
        self._follower, self._run, self._names = runs.follower, run, names
        self._state = {id(tensor): name for name, tensor in runs.state.items()}
        self._values = {id(runs.inputs): 0}
        self.constants: list[list[Plain]] = []
        self._numbers: dict[int, int] = {}

    def encode_calls(self) -> list[list[Plain]]:
        """All calls in order: function, arguments, named arguments, numbers of the results, layer."""
        return [self._encode_call(call) for call in self._run.calls]

    def find_value(self, tensor: Tensor) -> int:
        """The number of a result of a call; 0 is the input."""
        return self._values[id(tensor)]

    def express(self, dim: Sequence[Leaf]) -> Plain:
        """The size of a dimension: a number, or an expression of axes."""
        size = express(dim, self._names)
        return size if isinstance(size, int) else {"size": size}

    def dims_of(self, tensor: Tensor) -> tuple[tuple[Leaf, ...], ...]:
        """The dimensions of a tensor."""
        return self._follower.dims_of(tensor)

    def encode(self, value: Any) -> Plain:  # noqa: PLR0911 - a table of types
        """An argument as plain data."""
        match value:
            case None | bool() | str():
                return value
            case Tensor():
                return self._encode_tensor(value)
            case int():
                return int(value)
            case float():
                return value if math.isfinite(value) else {"float": str(value)}
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": 0}
            case slice():
                return {"slice": [self.encode(bound) for bound in (value.start, value.stop, value.step)]}
            case tuple():
                return {"tuple": [self.encode(item) for item in value]}
            case list():
                return [self.encode(item) for item in value]
            case _:
                return self._encode_rare(value)

    def _encode_rare(self, value: Any) -> Plain:
        if value is Ellipsis:
            return {"ellipsis": 0}
        if isinstance(value, Mapping):
            return {"dict": [[key, self.encode(item)] for key, item in value.items()]}
        if isinstance(value, (torch.layout, torch.memory_format)):
            return None
        raise ConfigError(f"a call has an argument of type {type(value).__name__}, which cannot be recorded")

    def _encode_tensor(self, tensor: Tensor) -> Plain:
        if id(tensor) in self._values:
            return {"value": self._values[id(tensor)]}
        if id(tensor) in self._state:
            return {"state": self._state[id(tensor)]}
        if id(tensor) not in self._numbers:
            if tensor.numel() > MOST_CONSTANTS:
                raise ConfigError(
                    f"the network uses a tensor of shape {tuple(tensor.shape)} that is no parameter and no buffer of "
                    "it; register it with register_buffer"
                )
            self._numbers[id(tensor)] = len(self.constants)
            self.constants.append(encode_tensor(tensor))
        return {"constant": self._numbers[id(tensor)]}

    def _encode_call(self, call: Call) -> list[Plain]:
        if call.name not in list_functions():
            raise ConfigError(
                f"layer {call.layer!r} calls {call.name}, which a recorded network cannot call; use functions of torch "
                "and torch.nn.functional"
            )
        try:
            args = [self.encode(item) for item in call.args]
            kwargs = {key: self.encode(item) for key, item in call.kwargs.items() if key not in _DROPPED}
        except ConfigError as error:
            raise ConfigError(f"layer {call.layer!r} calls {call.name}: {error}") from error
        if call.name in SIZED:
            args, kwargs = SIZED[call.name](self, call, args, kwargs)
        several = isinstance(call.out, (tuple, list))
        numbers = [self._number(out) for out in (call.out if several else [call.out])]
        return [call.name, args, kwargs, numbers if several else numbers[0], call.layer]

    def _number(self, out: Any) -> int | None:
        """The number of a result; None if it is no new tensor."""
        if not isinstance(out, Tensor) or id(out) in self._state:
            return None
        return self._values.setdefault(id(out), len(self._values))


def encode_tensor(tensor: Tensor) -> list[Plain]:
    """A tensor as its type, shape and little-endian bytes in base 85."""
    content = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b85encode(content).decode()]
