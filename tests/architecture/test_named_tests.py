"""Tests that the documentation names exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/invariants.md"
NAMED = re.compile(r"`((?:tests|emulation)/[^`]+)`")
LINES = PAGE.read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line.startswith("| ") and not line.startswith("| invariant |")]


@functools.cache
def names_in(path: Path) -> set[str]:
    """Names of the tests of a file: functions, methods of contract classes and test cases of state machines."""
    names = set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    contracts = (method for node in body if isinstance(node, ast.ClassDef) for method in node.body)
    for node in (*body, *contracts):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def missing_tests(row: str) -> list[str]:
    """Tests that a row of the page names but that do not exist; the row itself if it names no test."""
    named = NAMED.findall(row.rstrip(" |").rpartition(" | ")[2])
    missing = [] if named else [row]
    for name in named:
        file, _, test = name.partition("::")
        path = ROOT / file
        if test:
            exists = test in names_in(path)
        else:
            exists = bool(names_in(path) if path.suffix else list(path.rglob("test_*.py")))
        if not exists:
            missing.append(name)
    return missing


@pytest.mark.slow
def test_every_invariant_names_tests_that_exist() -> None:
    assert len(ROWS) > 70
    assert [name for row in ROWS for name in missing_tests(row)] == []
