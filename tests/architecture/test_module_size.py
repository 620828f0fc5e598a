"""One concept a file, and functions that fit on a screen."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = (*(path.parent.name for path in ROOT.glob("*/subfleet")), "tests", "benchmarks", "scripts", "examples")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_there_are_modules() -> None:
    assert len(MODULES) > 40


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_module_and_its_functions_are_short(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    long = [
        f"{node.name} at line {node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []
