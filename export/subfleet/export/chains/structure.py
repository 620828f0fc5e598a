"""What decides what a module computes besides the numbers in its weights: places where it is equal share a program."""

from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["structure_of"]

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.layout)
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""What stands for itself: two places that call the same function do the same."""
_OF_STATES = frozenset(
    {
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
    }
)
"""Attributes of PyTorch's that say how weights are read and written."""
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Of its recurrent layers, lists of their own parameters."""


def structure_of(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same of the same weights; of what is not known to be equal, never.

    It is told from the classes of all layers, their attributes, their parameters' shapes, and constants.
    """
    carried = set(module.state_dict(keep_vars=True))
    return tuple((path, _layer(layer, path, carried)) for path, layer in module.named_modules(remove_duplicate=False))


def _layer(layer: nn.Module, path: str, carried: set[str]) -> Hashable:
    left_out = _OF_STATES | _OF_PARAMETERS if isinstance(layer, nn.RNNBase) else _OF_STATES
    own = {name: value for name, value in vars(layer).items() if name not in left_out}
    own["_modules"] = {name: child is None for name, child in layer._modules.items()}  # noqa: SLF001 - PyTorch's
    own["_buffers"] = {
        name: _describe_buffer(value) if f"{path}.{name}" in carried or (not path and name in carried) else value
        for name, value in layer._buffers.items()  # noqa: SLF001 - likewise
    }
    return type(layer), _describe(own)


def _describe_buffer(buffer: Tensor | None) -> Any:
    """A buffer that travels with the weights where it holds numbers; one of another type is a constant."""
    if buffer is None or not buffer.is_floating_point():
        return buffer
    return ("buffer", tuple(buffer.shape), buffer.dtype)


def _describe(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return type(value), tuple((_describe(key), _describe(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_describe, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_describe, value))
    return _describe_leaf(value)


def _describe_leaf(value: Any) -> Hashable:
    if isinstance(value, nn.Parameter):
        return "parameter", tuple(value.shape), value.dtype, value.requires_grad
    if type(value) is Tensor:
        plain = value.detach().cpu().contiguous().reshape(-1)
        return "constant", tuple(value.shape), value.dtype, plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, _NAMED):
        return value
    return (type(value), value) if isinstance(value, _PLAIN) else _UniqueValue(value)


class _UniqueValue:
    """Something of which it is not known what it does: it is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UniqueValue) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
