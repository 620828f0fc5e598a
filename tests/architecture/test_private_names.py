"""Tests use the public interface: no name that begins with an underscore, except for a few of libraries."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ALLOWED = {
    "aten.*": "an operator of PyTorch is called as in its schema, which may begin with an underscore",
    "Tensor._make_wrapper_subclass": "PyTorch has no other way to make a tensor that wraps another one",
    "torch.utils._python_dispatch": "PyTorch has its dispatch modes there alone",
    "torch._subclasses.functional_tensor": "the product traces with it, and is compared with PyTorch's own tracer",
}
"""Patterns of private names of libraries, with the reason why tests need each."""
DOTTED = re.compile(r"\w+(\.\w+)*")
BY_NAME = frozenset({"attrgetter", "delattr", "getattr", "hasattr", "object", "patch", "setattr"})
"""Functions that take the name of an attribute as a string, such as those of `monkeypatch` and `unittest.mock`."""


def is_private(dotted: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in dotted.split("."))


def list_private_names(source: str) -> Iterator[tuple[int, str]]:
    """List the private names that a module uses, with their lines, except for those of `self` and `cls`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                names = []
            case ast.Attribute(value, attr):
                names = [f"{ast.unparse(value)}.{attr}"] if is_private(attr) else []
            case ast.ImportFrom(module, aliases):
                names = [module or "", *(alias.name for alias in aliases if is_private(alias.name))]
            case ast.Import(aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called in BY_NAME:
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                names = [text for text in texts if DOTTED.fullmatch(text)]
            case _:
                names = []
        yield from ((node.lineno, name) for name in names if is_private(name))  # type: ignore[attr-defined]


def find_reason(name: str) -> str | None:
    return next((pattern for pattern in ALLOWED if fnmatchcase(name, pattern)), None)


@pytest.mark.slow
def test_no_test_touches_a_private_name() -> None:
    uses = [
        (f"{path.relative_to(TESTS)}:{line}: {name}", find_reason(name))
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in list_private_names(path.read_text(encoding="utf-8"))
    ]
    assert [use for use, reason in uses if reason is None] == []
    assert {reason for _, reason in uses} == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("server._link.close()", "server._link"),
        ("self.server._work = None", "self.server._work"),
        ("make()._state", "make()._state"),
        ("from subfleet.emulation.processes import _fetched", "_fetched"),
        ("from subfleet._hidden import thing", "subfleet._hidden"),
        ("import subfleet._hidden", "subfleet._hidden"),
        ("monkeypatch.setattr(database, '_PATIENCE_MS', 1)", "_PATIENCE_MS"),
        ("monkeypatch.setattr('subfleet.rounds.obstacles._MOST', 2)", "subfleet.rounds.obstacles._MOST"),
        ("getattr(server, '_link')", "_link"),
        ("mock.patch.object(server, '_link')", "_link"),
        ("torch._C.thing", "torch._C"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert [*list_private_names(source)] == [(1, name)]
    assert find_reason(name) is None


@pytest.mark.parametrize(
    "source",
    [
        "self._link.close()",
        "super()._link",
        "server.__class__",
        "_mine = 1",
        "text.replace('_', '-')",
        "getattr(server, name)",
        "from __future__ import annotations",
    ],
)
def test_own_names_and_special_names_are_not_private_names(source: str) -> None:
    assert [*list_private_names(source)] == []
