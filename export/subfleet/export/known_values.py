"""Numbers that follow from no input, known though only shapes are traced.

Networks look at some of them: whether positions that they have counted themselves go up, or a mask of theirs masks
anything. What is looked at is then computed, and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["LOOKS", "KnownValues"]

LOOKS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default})  # noqa: SLF001 - its name
"""Operators by which Python looks at a number."""
_MOST_NUMBERS = 10_000_000
"""Of a tensor that is computed to be looked at."""


class KnownValues:
    """What calls gave that follow from constants alone, and how."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Any, Any, Any, int | None]] = {}
        self._alive: list[Tensor] = []  # a tensor is known by its identity
        self._found: dict[int, Tensor] = {}

    def hold(self, stand_in: Tensor, tensor: Tensor) -> None:
        """Know what a tensor without numbers stands for."""
        self._found[id(stand_in)] = tensor
        self._alive.append(stand_in)

    def record(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember the results of a call whose inputs are known, and forget tensors that it changes in place."""
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
        """The one number that it has; None where that follows from an input."""
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
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._compute_argument)
            result = func(*args, **{**kwargs, **({"device": torch.device("cpu")} if "device" in kwargs else {})})
            self._found[id(tensor)] = result if index is None else result[index]
        return self._found[id(tensor)]

    def _compute_argument(self, value: Any) -> Any:
        return self._compute(value) if isinstance(value, Tensor) else value


def _tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    fx.node.map_aggregate(value, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
    return tensors
