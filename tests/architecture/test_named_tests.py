"""Tests that the documentation names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/invariants.md"
NAMED = re.compile(r"`((?:tests|emulation)/[^`]+)`")
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines()[2:] if line.startswith("| ")][1:]


def names_in(path: Path) -> set[str]:
    """Names of a file's functions, of those of its contracts, and of what hypothesis makes of state machines."""
    names = set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    contracts = (one for node in body if isinstance(node, ast.ClassDef) for one in node.body)
    for node in (*body, *contracts):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_there_are_invariants() -> None:
    assert len(ROWS) > 70


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_every_invariant_names_tests_that_are_there(row: str) -> None:
    named = NAMED.findall(row.rstrip(" |").rpartition(" | ")[2])
    assert named
    for name in named:
        place, _, test = name.partition("::")
        path = ROOT / place
        if test:
            assert test in names_in(path), f"{place} has no test {test!r}"
        elif path.suffix:
            assert names_in(path), f"{place} has no test"
        else:
            assert list(path.rglob("test_*.py")), f"{place} holds no tests"
