"""All that a network holds, wherever it does: attributes of its layers, and dicts, lists and objects inside of them."""

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from subfleet.export.steps.stirring import is_source
from subfleet.export.steps.surroundings import NameScope, surrounding_names

__all__ = ["Change", "StateSnapshot"]

_NOT_HELD = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(Tensor, Enum, logging.Logger, str, bytes, int, float),
)
"""What is looked at as one thing, or is everybody's and not the network's."""
_OF_LAYERS = ("_parameters", "_buffers", "_modules")
"""Attributes in which PyTorch keeps the others."""
_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of PyTorch's recurrent layers, which in every run list the parameters that they have then."""
_DEPTH = 5
"""How far from a layer is looked: a list of objects that know their neighbours, such as a graph, is no state."""
_OUTSIDE = 3
"""How far from a layer something counts as that is everybody's: a module has much that is no network's state."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that the network held has become something else.

    Attributes:
        name: as in Python, seen from the network.
        old: what it was; None where there was nothing.
    """

    name: str
    old: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """One dict, list or deque as it was; of an object, its attributes."""

    path: str
    of_attributes: bool
    content: Any
    before: Any

    def name(self, key: Any) -> str:
        if not self.of_attributes:
            return f"{self.path}[{key!r}]"
        return f"{self.path}.{key}" if self.path else str(key)

    def items(self) -> Mapping[Any, Any]:
        """What it held, by key or index."""
        return _items(self.before)

    def changes(self) -> Iterator[Change]:
        before, now = self.items(), _items(self.content)
        for key in (*before, *(key for key in now if key not in before)):
            old = before.get(key, _MISSING)
            if not _is_same(old, now.get(key, _MISSING)):
                yield Change(name=self.name(key), old=None if old is _MISSING else old)

    def forget_tensors(self) -> None:
        before, now = self.items(), _items(self.content)
        new = [key for key, value in now.items() if isinstance(value, Tensor) and before.get(key) is not value]
        for key in reversed(new):
            if key in before:
                self.content[key] = before[key]
            else:
                del self.content[key]

    def restore(self, excepted: str | None) -> None:
        before, now = self.items(), _items(self.content)
        if len(before) == len(now) and all(key in now and now[key] is old for key, old in before.items()):
            return
        current = {key: value for key, value in now.items() if self.name(key) == excepted}
        after = {**before, **current}
        if isinstance(self.content, NameScope):
            self.content.update({key: value for key, value in after.items() if now.get(key, _MISSING) is not value})
            return
        self.content.clear()
        if isinstance(self.content, dict):
            put = OrderedDict.__setitem__ if isinstance(self.content, OrderedDict) else dict.__setitem__
            for key, value in after.items():  # some kinds of dict have no `update`, or make something else of a value
                put(self.content, key, value)
        else:
            self.content.extend(after.values())


def _items(content: Any) -> Mapping[Any, Any]:
    """What it holds, as it lies there: some kinds of dict make another value whenever one is asked for."""
    if isinstance(content, dict):
        return dict(dict.items(content))
    return dict(content) if isinstance(content, NameScope) else dict(enumerate(content))


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, (str, bytes, int, float)) and bool(old == new)


class StateSnapshot:
    """What a network holds, remembered.

    Args:
        module: the network.

    Attributes:
        tensors: all of them, by the first name of each.
        sources: names of what gives another value each time that it is asked, such as iterators.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[_Container] = []
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        self.sources: list[str] = []
        outside = [(owner, names, _OUTSIDE) for owner, names in surrounding_names(module)]
        waiting: list[tuple[str, Any, int]] = [*outside, ("", module, 0)]  # what a layer holds is called so
        while waiting:
            path, value, depth = waiting.pop()
            depth = 0 if isinstance(value, nn.Module) else depth
            if is_source(value):
                self.sources.append(path)
            elif isinstance(value, Tensor):
                tensors.setdefault(path, value)
            elif id(value) not in seen and depth < _DEPTH and not isinstance(value, _NOT_HELD):
                seen.add(id(value))
                waiting.extend((name, part, depth + 1) for name, part in reversed(list(self._parts_of(path, value))))
        self.tensors: Mapping[str, Tensor] = tensors

    def _parts_of(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (tuple, set, frozenset)):
            yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
        if isinstance(value, (dict, list, deque)):
            yield from self._track(path, value, of_attributes=False)
        if isinstance(value, NameScope):
            yield from self._track(path, value, of_attributes=True)
            return
        if type(value).__dictoffset__:
            separate = _OF_LAYERS if isinstance(value, nn.Module) else ()
            attributes = vars(value)
            for name in separate:
                if isinstance(attributes.get(name), dict):
                    yield from self._track(path, attributes[name], of_attributes=True)
            own = self._track(path, attributes, of_attributes=True)
            yield from ((name, part) for name, part in own if name.rpartition(".")[2] not in separate)

    def _track(self, path: str, content: Any, *, of_attributes: bool) -> list[tuple[str, Any]]:
        before = _items(content) if isinstance(content, (dict, NameScope)) else list(content)
        holder = _Container(path=path, of_attributes=of_attributes, content=content, before=before)
        self._holders.append(holder)
        return [(holder.name(key), part) for key, part in holder.items().items()]

    def changes(self) -> list[Change]:
        """What has become something else since: another object, or another number or text."""
        changes = (change for holder in self._holders for change in holder.changes())
        return [change for change in changes if not change.name.rpartition(".")[2].startswith(_OF_PARAMETERS)]

    def forget_tensors(self) -> None:
        """Take away the tensors that have come since, and leave numbers and all else as they are now."""
        for holder in self._holders:
            holder.forget_tensors()

    def restore(self, *, excepted: str | None = None) -> None:
        """Make all that is held what it was.

        Args:
            excepted: the name of what stays as it is now.
        """
        for holder in self._holders:
            holder.restore(excepted)
