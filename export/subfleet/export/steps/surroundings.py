"""What the code of a network reads that no layer holds: attributes of its classes, names of its modules, closures.

A program repeats all of it as it was when it was written, so that changes of it are looked for as in what layers hold.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from subfleet.export.steps.parameter_hooks import hooks_of

__all__ = ["NameScope", "surrounding_names"]

_DEPTH = 3
"""How far functions are followed from a method: through those that it calls, of its own package."""


class NameScope(MutableMapping[str, Any]):
    """Some names of a class, a module or a closure, as a mapping.

    Args:
        names: which.
        read: gives what a name stands for; KeyError, AttributeError or ValueError where it stands for nothing.
        write: makes it stand for something.
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
        """Deletes nothing: a name that code has given a value is not ours to take away."""

    def _has(self, name: str) -> bool:
        try:
            self._read(name)
        except (AttributeError, KeyError, ValueError):
            return False
        return True


def surrounding_names(module: nn.Module) -> Iterator[tuple[str, NameScope]]:
    """The names that the code of a network reads, with their owner's name as people call it."""
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
            yield kind.__name__, NameScope(names, vars(kind).__getitem__, _set_on(kind))
    for function in followed:
        yield from _names_read_by(function)


def _reachable_names(methods: Mapping[str, Any]) -> set[str]:
    """The names that `forward` reads, and the methods that it may call."""
    names, waiting = set[str](), ["forward"]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            if isinstance(methods.get(name), FunctionType):
                waiting.extend(_names_of(methods[name].__code__))
    return names


def _attributes_and_hooks(module: nn.Module) -> Iterator[Any]:
    """What layers keep as attributes, and the hooks of layers and parameters; some of these are functions."""
    for layer in module.modules():
        for value in vars(layer).values():
            yield from value.values() if isinstance(value, dict) else (value,)
    for part in module.parameters():
        yield from hooks_of(part)


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in {"torch", "builtins", "abc", "typing"}


def _set_on(kind: type) -> Callable[[str, Any], None]:
    return lambda name, value: setattr(kind, name, value)


def _is_data(name: str, value: Any) -> bool:
    is_code = callable(value) or hasattr(value, "__get__")
    return not name.startswith("__") and not is_code


def _function_of(value: Any) -> Any:
    """The Python function within a method, a class method or a decorated function."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, name, value)
    return value


def _follow(function: Any, followed: dict[FunctionType, None], depth: int) -> None:
    """A function, and those of its package that it may call."""
    if not isinstance(function, FunctionType) or function in followed or depth > _DEPTH:
        return
    followed[function] = None
    package = function.__module__.partition(".")[0]
    for name in _names_of(function.__code__):
        callee = _function_of(function.__globals__.get(name))
        if isinstance(callee, FunctionType) and callee.__module__.partition(".")[0] == package:
            _follow(callee, followed, depth + 1)


def _names_read_by(function: FunctionType) -> Iterator[tuple[str, NameScope]]:
    scope = function.__globals__
    used = dict.fromkeys(name for name in _names_of(function.__code__) if name in scope)
    data = [name for name in used if _is_data(name, scope[name])]
    if data:
        yield function.__module__, NameScope(data, scope.__getitem__, scope.__setitem__)
    cells: dict[str, CellType] = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if cells:
        yield function.__name__, NameScope([*cells], lambda name: cells[name].cell_contents, _set_in(cells))


def _set_in(cells: dict[str, CellType]) -> Callable[[str, Any], None]:
    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    return write


def _names_of(code: CodeType) -> Iterator[str]:
    """Of a function and of those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
