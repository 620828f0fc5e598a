"""Snapshots all that a network holds: attributes of layers, nested containers, and names that its code reads.

A program contains all of it as constants, so changes are detected here. Names outside of layers are attributes of
classes, globals of modules, and closures.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from subfleet.export.steps.parameter_hooks import hooks_of
from subfleet.export.steps.seeding import is_source

_CALL_DEPTH = 3
"""The most calls that are followed from a method, within its own package."""


class _NameScope(MutableMapping[str, Any]):
    """Some names of a class, a module or a closure, as a mapping.

    Args:
        names: the names.
        read: returns the value of a name; KeyError, AttributeError or ValueError if it has none.
        write: sets the value of a name.
    """

    def __init__(self, names: list[str], read: Callable[[str], Any], write: Callable[[str, Any], None]) -> None:
        self._names, self._read, self._write = names, read, write

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if self._has(name)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(name, value)

    def __delitem__(self, name: str) -> None:
        """Do nothing: a name that other code has set must not be deleted."""

    def _has(self, name: str) -> bool:
        try:
            self._read(name)
        except (AttributeError, KeyError, ValueError):
            return False
        return True


def _surrounding_names(module: nn.Module) -> Iterator[tuple[str, _NameScope]]:
    """Yield the names that the code of a network reads, with the name of their owner."""
    kinds = dict.fromkeys(kind for layer in module.modules() for kind in type(layer).__mro__ if _is_own(kind))
    followed: dict[FunctionType, None] = {}
    for function in map(_function_of, _attributes_and_hooks(module)):
        _follow(function, followed, 0)
    for kind in kinds:
        methods = {name: _function_of(value) for name, value in vars(kind).items()}
        for name in _reachable_names(methods) & methods.keys():
            _follow(methods[name], followed, 0)
    used = {name for function in followed for name in _names_of(function.__code__)}
    for kind in kinds:
        names = [name for name, value in vars(kind).items() if name in used and _is_data(name, value)]
        if names:
            yield kind.__name__, _NameScope(names, vars(kind).__getitem__, partial(setattr, kind))
    for function in followed:
        yield from _names_read_by(function)


def _reachable_names(methods: Mapping[str, Any]) -> set[str]:
    """Return the names that `forward` reads, directly or through methods that it may call."""
    names, waiting = set[str](), ["forward"]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            if isinstance(methods.get(name), FunctionType):
                waiting.extend(_names_of(methods[name].__code__))
    return names


def _attributes_and_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of layers, and the hooks of layers and parameters; some of these are functions."""
    for layer in module.modules():
        for value in vars(layer).values():
            yield from value.values() if isinstance(value, dict) else (value,)
    for part in module.parameters():
        yield from hooks_of(part)


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in {"torch", "builtins", "abc", "typing"}


def _is_data(name: str, value: Any) -> bool:
    is_code = callable(value) or hasattr(value, "__get__")
    return not name.startswith("__") and not is_code


def _function_of(value: Any) -> Any:
    """Return the Python function in a method, class method or decorated function."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, name, value)
    return value


def _follow(function: Any, followed: dict[FunctionType, None], depth: int) -> None:
    """Add a function, and the functions of its package that it may call."""
    if not isinstance(function, FunctionType) or function in followed or depth > _CALL_DEPTH:
        return
    followed[function] = None
    package = function.__module__.partition(".")[0]
    for name in _names_of(function.__code__):
        callee = _function_of(function.__globals__.get(name))
        if isinstance(callee, FunctionType) and callee.__module__.partition(".")[0] == package:
            _follow(callee, followed, depth + 1)


def _names_read_by(function: FunctionType) -> Iterator[tuple[str, _NameScope]]:
    scope = function.__globals__
    used = dict.fromkeys(name for name in _names_of(function.__code__) if name in scope)
    data = [name for name in used if _is_data(name, scope[name])]
    if data:
        yield function.__module__, _NameScope(data, scope.__getitem__, scope.__setitem__)
    cells: dict[str, CellType] = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if cells:
        yield (
            function.__name__,
            _NameScope(
                [*cells],
                lambda name: cells[name].cell_contents,
                lambda name, value: setattr(cells[name], "cell_contents", value),
            ),
        )


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of a function and of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


_NOT_HELD = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(Tensor, Enum, logging.Logger, str, bytes, int, float),
)
"""Types that are treated as a single value, or are shared and not the network's."""
_OF_LAYERS = ("_parameters", "_buffers", "_modules")
"""Attributes in which PyTorch keeps parameters, buffers and layers."""
_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of PyTorch's recurrent layers that list their current parameters in every run."""
_DEPTH = 5
"""How deep containers are searched from a layer: a graph of objects that refer to each other is not state."""
_OUTSIDE = 3
"""The depth at which names outside of layers start: a module holds much that is not a network's state."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that the network held and that is different now.

    Attributes:
        name: the Python name, seen from the network.
        old: the value before; None if there was none.
    """

    name: str
    old: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """A dict, list or deque as it was, or the attributes of an object."""

    path: str
    of_attributes: bool
    content: Any
    before: Any

    def name(self, key: Any) -> str:
        if not self.of_attributes:
            return f"{self.path}[{key!r}]"
        return f"{self.path}.{key}" if self.path else str(key)

    def items(self) -> Mapping[Any, Any]:
        """The content at the time of the snapshot, by key or index."""
        return self.before if isinstance(self.before, dict) else _items(self.before)

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
        if isinstance(self.content, _NameScope):
            self.content.update({key: value for key, value in after.items() if now.get(key, _MISSING) is not value})
            return
        self.content.clear()
        if isinstance(self.content, dict):
            put = OrderedDict.__setitem__ if isinstance(self.content, OrderedDict) else dict.__setitem__
            for key, value in after.items():  # some kinds of dict have no `update`, or change values
                put(self.content, key, value)
        else:
            self.content.extend(after.values())


def _items(content: Any) -> Mapping[Any, Any]:
    """Return the content as it is stored: some kinds of dict create a new value on each access."""
    if isinstance(content, dict):
        return dict(dict.items(content))
    return dict(content) if isinstance(content, _NameScope) else dict(enumerate(content))


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, (str, bytes, int, float)) and bool(old == new)


class StateSnapshot:
    """A snapshot of what a network holds.

    Args:
        module: the network.

    Attributes:
        tensors: all tensors, by the first name of each.
        sources: names of values that differ on each access, such as iterators.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[_Container] = []
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        self.sources: list[str] = []
        outside = [(owner, names, _OUTSIDE) for owner, names in _surrounding_names(module)]
        waiting: list[tuple[str, Any, int]] = [*outside, ("", module, 0)]  # names within the network come first
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
        if isinstance(value, _NameScope):
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
        before = _items(content) if isinstance(content, (dict, _NameScope)) else list(content)
        holder = _Container(path=path, of_attributes=of_attributes, content=content, before=before)
        self._holders.append(holder)
        return [(holder.name(key), part) for key, part in holder.items().items()]

    def changes(self) -> list[Change]:
        """Return the changes since the snapshot: different objects, and different numbers or texts."""
        changes = (change for holder in self._holders for change in holder.changes())
        return [change for change in changes if not change.name.rpartition(".")[2].startswith(_OF_PARAMETERS)]

    def forget_tensors(self) -> None:
        """Remove tensors that were added since the snapshot; everything else stays."""
        for holder in self._holders:
            holder.forget_tensors()

    def restore(self, *, excepted: str | None = None) -> None:
        """Restore everything that was held.

        Args:
            excepted: the name of a value that stays as it is now.
        """
        for holder in self._holders:
            holder.restore(excepted)
